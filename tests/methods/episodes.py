"""Small episodes and loss inputs made by hand, for tests of methods."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.learner.losses import LossInputs
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn


def turn(tokens: int = 2, calls: Sequence[ToolCall] = (), text: str | None = None, back: str = "") -> Turn:
    action = Action(text=text, tool_calls=tuple(calls))
    return Turn([1], list(range(tokens)), [0.0] * tokens, 0, action, (Message("tool", back),))


def episode(turns: Sequence[Turn], reward: float = 0.0, member: int = 0, task_id: str = "t") -> Trajectory:
    outcome = Outcome.SOLVED if reward >= 1 else Outcome.FAILED
    return Trajectory(task_id, member, list(turns), outcome, StopReason.USER_STOP, reward, domain="telecom")


def group(lengths: Sequence[Sequence[int]], rewards: Sequence[float]) -> Group:
    """Return a group of episodes with so many sampled tokens in each turn."""
    members = [
        episode([turn(n) for n in of_turns], reward, i)
        for i, (of_turns, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group("t", members)


def loss_inputs(
    policy: Sequence[Tensor], behavior: Sequence[Tensor], advantages: Sequence[Tensor], cut: slice = slice(None)
) -> LossInputs:
    """Return what a loss sees of some trajectories, each a [T] tensor; `cut` picks those of a micro-batch."""
    lengths = [len(p) for p in policy]
    index = list(range(len(policy)))[cut]
    return LossInputs(
        policy_logprobs=torch.cat([policy[i] for i in index]),
        behavior_logprobs=torch.cat([behavior[i] for i in index]),
        advantages=torch.cat([advantages[i] for i in index]),
        trajectory=torch.cat([torch.full((lengths[i],), i) for i in index]),
        trajectory_tokens=torch.cat([torch.full((lengths[i],), lengths[i]) for i in index]),
        tokens=sum(lengths),
        trajectories=len(policy),
    )
