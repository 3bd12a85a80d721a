"""What is checked: a run of the user's recipe, a few of its episodes, and rows with a gradient to compare."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkflex.build import make_env
from sinkflex.config import Config
from sinkflex.learner.rows import rows_of
from sinkflex.learner.scorer import Scorer
from sinkflex.learner.step import PROXIMAL, Needs, count
from sinkflex.rollout.group import Phase, rollout
from sinkflex.run import Run, open_run
from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Row

TASKS, MEMBERS, TURNS, TURN_TOKENS = 2, 3, 3, 24
CONTEXT, LENGTH = 32, 96  # of the rows whose gradient is compared, so that a real model needs minutes
NOISE = 0.1  # of the log-probs the rows were sampled with, so that ratios differ from 1 and some are clipped


class Broken(Exception):
    """A promise does not hold: what was found, and what the user can do."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


@dataclass
class Subject:
    """A run that was just opened, and episodes of it."""

    run: Run
    groups: list[Group]

    @cached_property
    def rows(self) -> list[Row]:
        """Parts of rows of the episodes, as if rewards differed and the policy had moved since it sampled them.

        The method scores the whole rows, as in training.
        """
        rng = generator(0, "check", "rows")
        advantages = [[np.full(t.sampled_tokens, rng.normal(), np.float32) for t in g.valid] for g in self.groups]
        whole = rows_of(self.groups, advantages)
        self.run.method.score(self.groups, whole, self.scorer)
        reach = getattr(self.run.policy.model.config.get_text_config(), "sliding_window", None) or 0
        rows = [part(row, CONTEXT, LENGTH + min(reach, 4 * LENGTH)) for row in whole]
        self.run.learner.recompute(rows)
        for i, row in enumerate(rows):
            noise = rng.normal(0, NOISE, (2, len(row))) * row.loss_mask
            policy = row.streams[PROXIMAL]
            row.streams[PROXIMAL] = (policy + noise[0]).astype(np.float32)
            rows[i] = replace(row, behavior_logprobs=(policy + noise.sum(0)).astype(np.float32))
        return rows

    @cached_property
    def scorer(self) -> Scorer:
        """The run's scorer; its reference is a model near the policy."""
        return self.run.scorer(reference=lambda: moved(self.run.policy.model))

    @cached_property
    def needs(self) -> Needs:
        """What the method reads."""
        method = self.run.method
        return Needs(
            method.needs_entropy,
            self.scorer.model("reference") if method.needs_reference else None,
            proximal=method.options.correction != "none",
            candidates=method.needs_candidates,
        )

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient of one step over all rows."""
        return self.gradient_of([self.rows])

    def gradient_of(self, shares: Sequence[Sequence[Row]]) -> dict[str, Tensor]:
        """Return the sum of the gradients of shares of a step, each computed apart, by parameter."""
        learner, method = self.run.learner, self.run.method
        counts = count([row for share in shares for row in share], method.options.count_zero_groups)
        learner.optimizer.zero_grad(set_to_none=True)
        for share in shares:
            learner.accumulate(share, method.loss, self.needs, counts)
        named = learner.model.named_parameters()
        found = {name: p.grad.clone() for name, p in named if p.grad is not None}
        if not any(bool(x.any()) for x in found.values()):
            raise Broken("the gradient is 0", "Check the coefficients and clip ranges of [method].")
        return found

    def difference(self, shares: Sequence[Sequence[Row]]) -> float:
        """Return how far the gradient of these shares is from the whole step's, relative to it."""
        other = self.gradient_of(shares)
        apart = sum(float((other[k] - x).double().square().sum()) for k, x in self.gradient.items())
        return (apart / sum(float(x.double().square().sum()) for x in self.gradient.values())) ** 0.5


def open_subject(config: Config, directory: Path) -> Subject:
    """Open the recipe's run in an empty directory and roll out a few short episodes."""
    config = shortened(config, directory)
    run = open_run(config)
    return Subject(run, roll_out(run, config.rollout.temperature, TASKS))


def shortened(config: Config, directory: Path) -> Config:
    """Return the recipe with a directory of its own and short episodes; model, template and method stay."""
    sections = {
        "run": {"directory": str(directory)},
        "env": {"max_turns": min(config.env.max_turns, TURNS)},
        "warmup": {"demonstrations": min(config.warmup.demonstrations, 4), "repeats": 1},
        "rollout": {
            "slots": min(config.rollout.slots, TASKS * MEMBERS),
            "max_turn_tokens": min(config.rollout.max_turn_tokens, TURN_TOKENS),
        },
        "log": {"writers": ("jsonl",)},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    )


def roll_out(run: Run, temperature: float, tasks: int) -> list[Group]:
    """Roll out groups of the recipe's training tasks, with the scripted user where the recipe has a server."""
    phase = Phase("train/check", run.config.run.seed, 0, 0, temperature)
    drawn = [draw.task_id for draw in run.tasks.draw(tasks, 0)]
    make = partial(make_env, run.config, offline=True)
    groups, _ = rollout(drawn, MEMBERS, make, run.chat, run.sampler, phase, hooks=run.method)
    faults = sorted({str(t.fault) for g in groups for t in g.members if not t.valid})
    if faults:
        raise ValueError(f"the environment fails: {'; '.join(faults)}")
    return groups


def part(row: Row, context: int, length: int) -> Row:
    """Return a part of a row: some tokens before the first sampled one, and what follows."""
    first = max(int(row.loss_mask.argmax()) - context, 0)
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    cut = {name: x[first : first + length] for name, x in values.items() if isinstance(x, np.ndarray)}
    return replace(row, **cut, streams={name: x[first : first + length] for name, x in row.streams.items()})


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Return a frozen copy of a model with a little noise in its weights."""
    other = copy.deepcopy(model)
    noise = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        for p in other.parameters():
            p += (0.01 * p.float().std(correction=0) * torch.randn(p.shape, generator=noise).to(p.device)).to(p.dtype)
    return other.requires_grad_(False)
