"""PATS: text that helps a weak policy during training, and fades (Policy-Aware Training Scaffolding, arXiv 2607.21419).

A group teaches with probability 1 - q^G - (1-q)^G for tasks solved with probability q: the text lifts q off 0, and is
withdrawn as q nears 1. Each task type has a bank of entries, shown after the system text to all siblings alike:

    roll out with the entries as they stand -> one evidence card a group -> e, p, mode (`scaffold/bank.py`)
    -> a reviewer's edits, valid as a whole or rejected -> the entries of the next step

The update is GRPO's, on the prompts as they were; the text is never trained on. Validation is free of it.

What we changed: the card's schema, the limits of a transaction, and task type = domain and family are ours. Who reviews
("rule" reads nothing but cards) is in metrics and receipts. The paper's warm-up with texts in the prompt is left out.
When it fails: a reviewer without insight fills the bank with noise. The average starts at 0, so that even a perfect
policy counts as weak for its first steps. What the policy learns with the text may need the text.
`shuffle_words` is the control of the content: the same words, out of order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from sinkflex.config import EndpointConfig
from sinkflex.envs.env import EnvironmentFault
from sinkflex.methods.hooks import Services, TaskFacts
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.methods.scaffold.bank import BUDGETS, Bank, Transaction, mode_of
from sinkflex.methods.scaffold.reviewers import Card, card_of, endpoint, read_edits, review_prompt, rule
from sinkflex.seeds import generator
from sinkflex.trajectory import Group


class PATSOptions(Options):
    """PATS' options."""

    reviewer: Literal["none", "rule", "policy", "endpoint"] = "rule"
    """Who edits the texts: nobody, a scripted rule, the policy itself, or a model on a server."""
    seed_entries: tuple[str, ...] = Field(default=(), strict=False)
    """Texts every task type starts with."""
    alpha: float = Field(0.1, gt=0, le=1)
    """Weight of a step in the moving average of success."""
    low: float = Field(0.3, ge=0, le=1)
    """From this average on entries are revised rather than added."""
    high: float = Field(0.7, ge=0, le=1)
    """From this average on entries are withdrawn."""
    max_entries: int = Field(30, ge=1)
    """A bank with as many entries is full."""
    max_scaffold_tokens: int = Field(2000, ge=1)
    """A bank of this size is full."""
    least_tasks: int = Field(2, ge=1)
    """Tasks of the step that an edit must rest on."""
    shuffle_words: bool = False
    """Control experiment: the words of each entry out of order, which must remove what the content is worth."""
    endpoint: EndpointConfig = EndpointConfig()
    """The server of `reviewer = "endpoint"`."""


class PATS(Method):
    """GRPO with text in the prompts of training."""

    Options = PATSOptions
    options: PATSOptions

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        super().__init__(options, max_tokens)
        self.step = 0
        self.banks: dict[str, Bank] = {}

    def bank(self, domain: str, tags: Any) -> tuple[str, Bank]:
        """Return the task type and its bank."""
        kind = f"{domain}/{tags['family']}" if "family" in tags else domain
        if kind not in self.banks:
            bank = self.banks[kind] = Bank(self.options.max_entries, self.options.max_scaffold_tokens)
            for text in self.options.seed_entries:
                bank.add("skill", text)
        return kind, self.banks[kind]

    def prompt(self, task: TaskFacts, phase: str) -> str | None:
        """Return the entries of the task's type in training, and nothing elsewhere."""
        if phase != "train":
            return None
        kind, bank = self.bank(task.domain, task.tags)
        texts = [text for _, text in bank.entries.values()]
        if self.options.shuffle_words:
            texts = [" ".join(generator(0, "words", kind, text).permutation(text.split())) for text in texts]
        return "\n".join(["Advice:", *(f"- {text}" for text in texts)]) if texts else None

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Make cards of the step, and let the reviewer edit the texts of the next one."""
        self.step += 1
        evidence: dict[str, list[tuple[str, Card]]] = defaultdict(list)
        numbers: dict[str, int] = {}
        for group in groups:
            card = card_of(group, numbers.setdefault(group.task_id, len(numbers)))
            if card is not None:
                evidence[self.bank(group.valid[0].domain, group.valid[0].tags)[0]].append((group.task_id, card))
        for kind, of_kind in sorted(evidence.items()):
            self.review(kind, [task for task, _ in of_kind], [card for _, card in of_kind], metrics, services)

    def review(
        self, kind: str, tasks: list[str], cards: list[Card], metrics: dict[str, float], services: Services
    ) -> None:
        """Review one task type, and log what came of it."""
        options, bank = self.options, self.banks[kind]
        bank.observe(self.step, float(np.mean([card.score for card in cards])), options.alpha)
        mode = mode_of(bank.average, bank.pressure, options.low, options.high)
        if options.reviewer != "none":
            draft = Transaction(self.step, mode, bank.view, tuple(tasks), (), options.reviewer)
            result = self.edit(draft, cards, bank, services)
            for word in ("applied", "rejected"):
                name = f"pats/{word}_by/{options.reviewer}"
                metrics[name] = metrics.get(name, 0.0) + result.startswith(word)
        if mode == "prune":
            bank.drop_newest()
        metrics[f"pats/{kind}/average"] = bank.average
        metrics[f"pats/{kind}/mode"] = float(list(BUDGETS).index(mode))
        metrics[f"pats/{kind}/entries"] = float(len(bank.entries))
        metrics[f"pats/{kind}/tokens"] = float(bank.tokens)

    def edit(self, draft: Transaction, cards: list[Card], bank: Bank, services: Services) -> str:
        """Fill a transaction with the reviewer's edits and apply it; a reviewer that fails changes nothing."""
        question = review_prompt(draft.mode, cards, bank)
        try:
            if self.options.reviewer == "rule":
                edits = rule(draft.mode, cards, bank, self.options.least_tasks)
            elif self.options.reviewer == "policy":
                edits = read_edits(services.scorer.generate([question], (0, "reviewer", self.step))[0])
            else:
                edits = read_edits(endpoint(self.options.endpoint)(question))
        except (ValueError, EnvironmentFault) as error:
            return f"rejected: {error}"
        return bank.apply(replace(draft, edits=tuple(edits)), self.options.least_tasks)

    def state_dict(self) -> dict[str, Any]:
        """Return the banks and the steps done."""
        return {"step": self.step, "banks": {kind: bank.state_dict() for kind, bank in self.banks.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.step = state["step"]
        for kind, of_bank in state["banks"].items():
            self.banks[kind] = Bank(self.options.max_entries, self.options.max_scaffold_tokens)
            self.banks[kind].load_state_dict(of_bank)
