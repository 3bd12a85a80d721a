"""ToolsRL: tool rewards first, task rewards later (arXiv 2604.19945), in the form of tau2's telecom tasks in solo.

With weights w of calls, over an episode's calls matched one to one with the gold calls, in any order:

    F1     = 2 TP / (2 TP + extra_weight FP + missed_weight FN)      TP, FN weigh gold calls, FP the other calls made
    tool   = 1/2 (largest F1 after any turn + F1 at the end)
    steps up to tool_steps:   R = tool + format_weight * readable    the task's own outcome enters nowhere
    steps after it:           R = task + format_weight * readable    tools are free

`readable` is the share of turns without a parse error. A call that only reads weighs `read_weight`, one that changes
something 1; `done` is no call. The advantages are GRPO's. Validation always shows the task's own reward.

What we changed: the paper scores image tools by their geometry, with the same weights of F1; its largest and last score
are those of images. Which weight the format has is not known; ours is 0.1. Gold calls are a reward, never a text.
`mixed` adds both rewards in all steps, which the paper found to be worse than no tool reward.
When it fails: gold calls are one way to solve a task, and another way earns less in the first phase. Without gold calls
the first phase gives the task's own reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from sinkflex.envs.env import ToolCall
from sinkflex.envs.tau2.actions import DONE
from sinkflex.methods.hooks import RewardParts, Services
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.tasks.gold import gold_calls, reads, same_call
from sinkflex.trajectory import Group, Trajectory


class ToolsRLOptions(Options):
    """ToolsRL's options."""

    tool_steps: int = Field(20, ge=0)
    """Steps of the first phase, in which only the calls are rewarded."""
    missed_weight: float = Field(1.0, ge=0)
    """What a gold call that was not made weighs (FN)."""
    extra_weight: float = Field(0.1, ge=0)
    """What a call that is no gold call weighs (FP)."""
    read_weight: float = Field(0.25, ge=0, le=1)
    """What a call that only reads weighs, where one that changes something weighs 1."""
    format_weight: float = Field(0.1, ge=0)
    """Reward for turns that can be read, in both phases."""
    mixed: bool = False
    """Control experiment: both rewards in all steps."""


class ToolsRL(Method):
    """GRPO whose reward has two phases."""

    Options = ToolsRLOptions
    options: ToolsRLOptions
    needs_solo = True

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        super().__init__(options, max_tokens)
        self.steps = 0

    async def reward(self, trajectory: Trajectory) -> RewardParts:
        """Return the reward of the phase; its parts are logged in both phases."""
        task, options = float(trajectory.reward or 0.0), self.options
        tool = self.tool_reward(trajectory)
        readable = float(np.mean([turn.action.error is None for turn in trajectory.turns])) if trajectory.turns else 0.0
        first = self.steps < options.tool_steps and tool is not None
        earned = task + (tool or 0.0) if options.mixed else tool if first and tool is not None else task
        parts = {"task": task, "format": readable, **({} if tool is None else {"tool": tool})}
        return RewardParts(earned + options.format_weight * readable, {**trajectory.reward_parts, **parts})

    def tool_reward(self, trajectory: Trajectory) -> float | None:
        """Return the reward for the calls of an episode; None if its task has no gold calls."""
        domain, gold = trajectory.domain, gold_calls(trajectory.domain, trajectory.task_id)
        if not gold:
            return None
        calls: list[ToolCall] = []
        scores = [0.0]
        for turn in trajectory.turns:
            calls += turn.action.tool_calls
            scores.append(call_f1(domain, calls, gold, self.options))
        return (max(scores) + scores[-1]) / 2

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Count the steps of the phase."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the steps done."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.steps = state["steps"]


def call_f1(domain: str, calls: Sequence[ToolCall], gold: Sequence[ToolCall], options: ToolsRLOptions) -> float:
    """Return the weighted F1 of calls against gold calls; a gold call made twice is an extra call once."""

    def weight(call: ToolCall) -> float:
        return options.read_weight if reads(domain, call.name) else 1.0

    left = list(gold)
    hits = extra = 0.0
    for call in calls:
        hit = next((k for k, wanted in enumerate(left) if same_call(domain, call, wanted)), None)
        if hit is not None:
            hits += weight(left.pop(hit))
        elif call.name != DONE:
            extra += weight(call)
    missed = sum(map(weight, left))
    total = 2 * hits + options.extra_weight * extra + options.missed_weight * missed
    return 2 * hits / total if total else 0.0
