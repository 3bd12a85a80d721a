"""SEED: distillation from lessons of one's own episodes (SElf-Evolving On-Policy Distillation, arXiv 2607.14777).

An analyzer turns each finished episode into a lesson. The sampled tokens are scored once more with the lesson after the
task in every prompt of the episode, and what that changes weighs a likelihood term beside GRPO:

    gap  = log p(token | prompt with the lesson) - log p(token | prompt)          fixed
    gate = sigmoid(beta gap)
    L    = L_GRPO + opd_weight sum m gate (log p with the lesson - log p) / sum m        gradient -gate grad log p

m marks the sampled tokens of episodes that have a lesson. Every such token is pushed up, in failures too, and one that
the lesson dislikes only less. What counts is how the gate varies: on-policy, a constant has gradient 0 in the mean. The
value of the term is no divergence and may be negative. Validation is free of lessons.

What we changed: std has G - 1 in it where the paper divides by G. `center` takes gate - 1/2: the same mean gradient
with less noise while data are on-policy. Lessons go to the end of the task's message. The analyzer is the policy, or a
rule that retells calls and is named as such; the paper's penalty for invalid actions is left out. With several
mini-batches the term has no ratio, and m is averaged over the batch; `teacher = "live"` scores again before each.
When it fails: all groups without variance still feel this term, and late in training it may rule.
`shuffle_lessons` is the control: each episode gets the lesson of another task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkflex.learner.losses import LossInputs, aggregate
from sinkflex.learner.scorer import Edit, Scorer, insert
from sinkflex.methods.credit import EPSILON
from sinkflex.methods.hooks import Services
from sinkflex.methods.lessons import SEEDOptions, by_policy, by_rule, of_other_tasks
from sinkflex.methods.method import Method
from sinkflex.metrics import register
from sinkflex.trajectory import Group, Row

TAUGHT, SHARE = "taught_logprobs", "lesson_share"
register("seed/lessons_by/*", "fraction", "episodes with a lesson, by who wrote it")
register("learner/opd", "nats", "mean of the likelihood term over the sampled tokens; no divergence")
register("learner/gate", "fraction", "mean gate over the sampled tokens, 0 where there is no lesson")
register("learner/gate_open", "fraction", "sampled tokens whose gate is above 1/2")
register("learner/gap", "nats", "mean of what a lesson changes in the log-prob of a sampled token")


class SEED(Method):
    """GRPO with a likelihood term gated by one's own lessons."""

    Options = SEEDOptions
    options: SEEDOptions

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        super().__init__(options, max_tokens)
        self.step = 0
        self.lessons: list[str] = []
        self.prompts: list[list[int]] = []

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens."""
        if self.options.statistics == "trajectory":
            return super().advantages(group)
        rewards = np.repeat([float(t.reward or 0.0) for t in group.valid], [len(t.turns) for t in group.valid])
        scale = rewards.std(ddof=1) + EPSILON if len(rewards) > 1 and np.ptp(rewards) else np.inf
        return [
            np.full(t.sampled_tokens, (float(t.reward or 0.0) - rewards.mean()) / scale, np.float32)
            for t in group.valid
        ]

    def score(self, groups: Sequence[Group], rows: Sequence[Row], scorer: Scorer) -> None:
        """Write a lesson for each episode, and score its sampled tokens with it in the prompts."""
        options = self.options
        if not options.opd_weight:
            return
        episodes = [t for group in groups for t in group.valid]
        if options.analyzer == "rule":
            self.lessons = [by_rule(t) for t in episodes]
        else:
            self.lessons = by_policy(episodes, scorer, self.step, options.lesson_tokens)
        if options.shuffle_lessons:
            self.lessons = of_other_tasks(self.lessons, [t.task_id for t in episodes])
        self.prompts = [t.turns[0].prompt_ids for t in episodes]
        taught = sum(row.loss_mask.sum() for row in rows if self.lessons[row.trajectory_index])
        total = sum(row.loss_mask.sum() for row in rows)
        for row in rows:
            share = total / taught if self.lessons[row.trajectory_index] else 0.0
            row.streams[SHARE] = np.where(row.loss_mask, share, 0.0).astype(np.float32)
        self.rescore(rows, scorer)

    def rescore(self, rows: Sequence[Row], scorer: Scorer) -> None:
        """Score rows under the prompts with their lessons, with the policy as it is now."""
        if self.options.opd_weight and (self.options.teacher == "live" or TAUGHT not in rows[0].streams):
            for row, logprobs in zip(rows, scorer.logprobs(rows, edit=self.edit(scorer)), strict=True):
                row.streams[TAUGHT] = logprobs

    def edit(self, scorer: Scorer) -> Edit:
        """Return what puts the lesson of a row's episode after its task."""

        def put(row: Row) -> Row:
            prompt, lesson = self.prompts[row.trajectory_index], self.lessons[row.trajectory_index]
            if not lesson:
                return row
            place, ids = scorer.chat.after_task(prompt, f" Advice: {lesson}")
            assert row.token_ids[:place].tolist() == prompt[:place], "a row does not begin with its task"
            return insert(row, place, ids)

        return put

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return GRPO's loss plus the gated likelihood."""
        loss, sums = super().loss(inputs)
        if TAUGHT not in inputs.streams:
            return loss, sums
        taught, m = inputs.streams[TAUGHT], inputs.streams[SHARE]
        gap = taught - inputs.policy_logprobs.detach()
        gate = torch.sigmoid(self.options.beta * gap)
        values = m * (gate - 0.5 * self.options.center) * (taught - inputs.policy_logprobs)
        has = (m > 0).to(gate.dtype)
        sums |= {"opd": values.detach().sum(), "gate": (has * gate).sum(), "gap": (has * gap).sum()}
        sums["gate_open"] = (has * (gate > 0.5)).sum()
        return loss + self.options.opd_weight * aggregate(values, inputs, "token_mean", every_group=True), sums

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Log how many episodes had a lesson, and whose."""
        self.step = services.step
        if self.lessons:
            metrics[f"seed/lessons_by/{self.options.analyzer}"] = float(np.mean([bool(x) for x in self.lessons]))

    def state_dict(self) -> dict[str, Any]:
        """Return the steps done."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.step = state["step"]
