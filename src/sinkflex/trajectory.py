"""The records that flow from rollout to learner. Token ids are the truth; text is a view of them.

Example: one trajectory of two turns. `p` are prompt ids (policy text, user, tool results), `a` sampled ids.

    turn 0:  prompt_ids [p p p p]   action_ids [a a a]      behavior_logprobs [-.1 -.3 -.2]
    turn 1:  prompt_ids [p p]       action_ids [a a]        behavior_logprobs [-.5 -.1]
    row:     token_ids  [p p p p a a a p p a a]
             loss_mask  [0 0 0 0 1 1 1 0 0 1 1]
             turn_index [0 0 0 0 0 0 0 1 1 1 1]

Shape letters: T tokens, K candidates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from sinkflex.envs.env import Action, Message, StopReason

TRAJECTORY_VERSION = 1


class Outcome(StrEnum):
    """What an episode amounts to. An infrastructure fault is `INVALID`: no reward, no baseline, no loss, no pass^k."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    INVALID = "invalid"


@dataclass(slots=True)
class Turn:
    """One policy message plus the environment's reply.

    Attributes:
        prompt_ids: [T0] ids added since the previous turn's last sampled id (the whole prompt on turn 0).
        action_ids: [T1] ids exactly as sampled, the stop token included when it was sampled.
        behavior_logprobs: [T1] float32 log-probs at the sampling temperature.
        policy_version: step at which the sampling weights were published.
        action: what the ids were parsed into; `action.error` holds a parse error.
        observation: messages that came back.
        finish: "stop" (a stop token was sampled) or "length" (the token limit cut it).
        forks: True when `prompt_ids` is a whole new prompt (the template rewrote history, or the context was
            windowed), so that a new row starts here.
        reward_parts: optional per-turn reward parts.
    """

    prompt_ids: list[int]
    action_ids: list[int]
    behavior_logprobs: list[float]
    policy_version: int
    action: Action
    observation: tuple[Message, ...] = ()
    finish: str = "stop"
    forks: bool = False
    reward_parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """The record of one episode of one member of a group.

    Attributes:
        reward: total reward, or None when the outcome is INVALID.
        reward_parts: the breakdown, e.g. {"ENV_ASSERTION": 1.0, "ACTION": 0.0}.
        fault: the cause, when the outcome is INVALID.
        tags: facts about the task for tables, e.g. {"family": "mms", "faults": 3}.
    """

    task_id: str
    member: int
    turns: list[Turn]
    outcome: Outcome
    stop_reason: StopReason
    reward: float | None
    reward_parts: dict[str, float] = field(default_factory=dict)
    user: str = "none"
    seed: int = 0
    fault: str | None = None
    tags: dict[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """False when an infrastructure fault ended the episode."""
        return self.outcome is not Outcome.INVALID

    @property
    def sampled_tokens(self) -> int:
        """Number of ids the policy sampled in the whole episode."""
        return sum(len(turn.action_ids) for turn in self.turns)


@dataclass(slots=True)
class Group:
    """The siblings of one task under one prompt, compared with each other."""

    task_id: str
    members: list[Trajectory]

    @property
    def valid(self) -> list[Trajectory]:
        """Members whose episode was not cut off by a fault."""
        return [t for t in self.members if t.valid]


@dataclass(slots=True)
class Row:
    """One contiguous token sequence for training. All arrays have length T.

    Attributes:
        token_ids: int64 ids.
        loss_mask: bool, True where the policy sampled the id.
        behavior_logprobs: float32, 0 where loss_mask is False.
        advantages: float32, filled by the method; 0 where loss_mask is False.
        policy_version: int64, version that sampled the id; -1 where loss_mask is False.
        turn_index: int64 turn of each id.
        streams: named extra arrays, [T] or [T, K]; entry t belongs to token t.
        group_index: index of the group in the batch.
        trajectory_index: index of the trajectory in the batch, counted over all groups.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    policy_version: np.ndarray
    turn_index: np.ndarray
    group_index: int
    trajectory_index: int
    streams: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values, with the version of this format."""
    return {
        "version": TRAJECTORY_VERSION,
        "task_id": trajectory.task_id,
        "member": trajectory.member,
        "outcome": str(trajectory.outcome),
        "stop_reason": str(trajectory.stop_reason),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "user": trajectory.user,
        "seed": trajectory.seed,
        "fault": trajectory.fault,
        "tags": trajectory.tags,
        "turns": [
            {
                "prompt_ids": list(map(int, turn.prompt_ids)),
                "action_ids": list(map(int, turn.action_ids)),
                "behavior_logprobs": [float(x) for x in turn.behavior_logprobs],
                "policy_version": turn.policy_version,
                "action": asdict(turn.action),
                "observation": [asdict(message) for message in turn.observation],
                "finish": turn.finish,
                "forks": turn.forks,
                "reward_parts": turn.reward_parts,
            }
            for turn in trajectory.turns
        ],
    }


def write_trajectories(path: Path, groups: Sequence[Group]) -> None:
    """Write a compressed JSONL file, one trajectory a line; it appears whole or not at all.

    Read it with `zstd -dc FILE | jq`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        json.dumps({"group": i, **to_record(t)}, ensure_ascii=False) + "\n"
        for i, group in enumerate(groups)
        for t in group.members
    )
    draft = path.with_name(f".{path.name}")
    draft.write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.encode()))
    draft.rename(path)
