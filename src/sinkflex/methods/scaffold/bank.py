"""PATS' state for one task type: short texts, a moving average of success, and edits that are applied whole or not.

    e    <- alpha o + (1 - alpha) e,  from 0           one observation o a step: the mean score of the type's tasks
    p     = max(entries / max_entries, tokens / max_tokens)
    mode  = prune if p >= 1, compress if e >= high, revise if e >= low, else expand       (in this order)

Modes, budgets and constants: arXiv 2607.21419 as audited by others. Ours: a transaction with one bad edit is rejected
whole, it speaks of one view of the bank, and its receipt makes a second application do nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sinkflex.behavior import jaccard, parts
from sinkflex.metrics import register

register("pats/*/average", "reward", "moving average of the scores of a task type")
register("pats/*/mode", "index", "what the review might do: 0 expand, 1 revise, 2 compress, 3 prune")
register("pats/*/entries", "entries", "texts in the bank of a task type")
register("pats/*/tokens", "tokens", "estimated size of the bank of a task type")
register("pats/applied_by/*", "reviews", "reviews that changed a bank, by who made them")
register("pats/rejected_by/*", "reviews", "reviews that were rejected, by who made them")

Mode = Literal["expand", "revise", "compress", "prune"]
# New entries of a review, by mode: skills of either kind, general ones among them, mistakes.
BUDGETS: dict[Mode, tuple[int, int, int]] = {
    "expand": (2, 1, 1),
    "revise": (1, 1, 1),
    "compress": (1, 1, 0),
    "prune": (0, 0, 0),
}
ALIKE, MAX_EDITS, MAX_LETTERS = 0.7, 4, 400


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: "add" (kind, text), "update" (entry, text) or "delete" (entry), and the cards it rests on."""

    do: str
    cites: tuple[int, ...] = ()
    entry: int = -1
    kind: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Edits written for one view of one bank, from the evidence of one step.

    Attributes:
        view: `Bank.view` when the reviewer saw it.
        evidence: the task each card is about, by the card's number.
    """

    step: int
    mode: Mode
    view: str
    evidence: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    reviewer: str = ""

    @property
    def key(self) -> str:
        """Names the transaction by its content."""
        return _digest(asdict(self))


def mode_of(average: float, pressure: float, low: float, high: float) -> Mode:
    """Return what a review may do."""
    if pressure >= 1:
        return "prune"
    return "compress" if average >= high else "revise" if average >= low else "expand"


def tokens_of(text: str) -> int:
    """Estimate tokens as a quarter of the letters, as the published code does."""
    return -(-len(text) // 4)


@dataclass(slots=True)
class Bank:
    """The entries of one task type: {number: (kind, text)}, the average of success, and receipts by key."""

    max_entries: int
    max_tokens: int
    entries: dict[int, tuple[str, str]] = field(default_factory=dict)
    average: float = 0.0
    observed: int = 0
    next_entry: int = 0
    receipts: dict[str, str] = field(default_factory=dict)

    @property
    def view(self) -> str:
        """Names the entries as they stand."""
        return _digest({str(number): entry for number, entry in self.entries.items()})

    @property
    def tokens(self) -> int:
        """Size of the rendered entries."""
        return sum(tokens_of(text) for _, text in self.entries.values())

    @property
    def pressure(self) -> float:
        """At least 1 when the bank is full."""
        return max(len(self.entries) / self.max_entries, self.tokens / self.max_tokens)

    def observe(self, step: int, score: float, alpha: float) -> None:
        """Move the average by a step's mean score, once."""
        if step > self.observed:
            self.observed, self.average = step, alpha * score + (1 - alpha) * self.average

    def add(self, kind: str, text: str) -> None:
        """Append an entry."""
        self.entries[self.next_entry] = (kind, text)
        self.next_entry += 1

    def apply(self, transaction: Transaction, least_tasks: int) -> str:
        """Apply a transaction whole or not at all; applied again, it changes nothing.

        Returns:
            "applied", "nothing to do", or "rejected: " and why.
        """
        if transaction.key not in self.receipts:
            draft = Bank(self.max_entries, self.max_tokens, dict(self.entries), next_entry=self.next_entry)
            problem = _problem(self, transaction, least_tasks) or _edit(draft, transaction)
            if not problem and transaction.mode in ("compress", "prune") and transaction.edits:
                problem = "" if draft.tokens < self.tokens else f"{transaction.mode} must make the bank smaller"
            result = f"rejected: {problem}" if problem else "applied" if draft.view != self.view else "nothing to do"
            if result == "applied":
                self.entries, self.next_entry = draft.entries, draft.next_entry
            self.receipts[transaction.key] = result
        return self.receipts[transaction.key]

    def drop_newest(self) -> None:
        """Make room when a review did not: the newest entries go first."""
        while self.entries and self.pressure >= 1:
            del self.entries[max(self.entries)]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "entries": [[number, *entry] for number, entry in self.entries.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; sizes stay what the recipe says."""
        self.entries = {number: (kind, text) for number, kind, text in state["entries"]}
        for name in ("average", "observed", "next_entry", "receipts"):
            setattr(self, name, state[name])


def _problem(bank: Bank, transaction: Transaction, least_tasks: int) -> str:
    """Return what is wrong with a transaction as a whole, or ""."""
    if transaction.view != bank.view:
        return "written for another view of the bank"
    if len(transaction.edits) > MAX_EDITS:
        return f"{len(transaction.edits)} edits, at most {MAX_EDITS}"
    for edit in transaction.edits:
        if not all(0 <= card < len(transaction.evidence) for card in edit.cites):
            return f"cites a card that is not of this step: {edit.cites}"
        tasks = {transaction.evidence[card] for card in edit.cites}
        if transaction.mode != "prune" and len(tasks) < least_tasks:
            return f"an edit rests on {len(tasks)} tasks, at least {least_tasks}"
    kinds = [edit.kind for edit in transaction.edits if edit.do == "add"]
    skills, general, mistakes = BUDGETS[transaction.mode]
    if len(kinds) - kinds.count("mistake") > skills or kinds.count("general") > general:
        return f"more new skills than {transaction.mode} allows"
    return f"more new mistakes than {transaction.mode} allows" if kinds.count("mistake") > mistakes else ""


def _edit(draft: Bank, transaction: Transaction) -> str:
    """Carry out the edits on a draft; return the first problem, or ""."""
    for edit in transaction.edits:
        if edit.do not in ("add", "update", "delete"):
            return f"an edit can add, update or delete, not {edit.do!r}"
        if edit.do != "add" and edit.entry not in draft.entries:
            return f"there is no entry {edit.entry}"
        if edit.do == "delete":
            del draft.entries[edit.entry]
            continue
        if not edit.text.strip() or len(edit.text) > MAX_LETTERS or "<|" in edit.text:
            return f"a text must have 1 to {MAX_LETTERS} letters and no control tokens"
        if edit.do == "update":
            draft.entries[edit.entry] = (draft.entries[edit.entry][0], edit.text)
        elif edit.kind not in ("general", "skill", "mistake"):
            return f"an entry is general, skill or mistake, not {edit.kind!r}"
        elif all(jaccard(parts(edit.text), parts(text)) <= ALIKE for _, text in draft.entries.values()):
            draft.add(edit.kind, edit.text)
    return ""


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
