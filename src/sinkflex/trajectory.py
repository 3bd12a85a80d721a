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
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.recipe import did_you_mean

TRAJECTORY_VERSION = 3


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
        executed: what was done instead of `action`, if a method stepped in.
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
    executed: Action | None = None


@dataclass(slots=True)
class Trajectory:
    """The record of one episode of one member of a group.

    Attributes:
        reward: total reward, or None when the outcome is INVALID.
        reward_parts: the breakdown, e.g. {"ENV_ASSERTION": 1.0, "ACTION": 0.0}.
        fault: the cause, when the outcome is INVALID.
        tags: facts about the task for tables, e.g. {"family": "mms", "faults": 3}.
        domain: which tasks `task_id` is one of, e.g. "telecom".
        record: (actor, message) in order, the user's side included: what agent ("assistant") and user ("user") said
            and called, and the tools' answers under the actor that asked. Calls are as they ran, after coercion.
        opening: what the agent was shown before its first turn: the method's words, the prompt, ticket or first words.
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
    domain: str = ""
    record: list[tuple[str, Message]] = field(default_factory=list)
    opening: list[Message] = field(default_factory=list)

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
        "domain": trajectory.domain,
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
        "record": [{"actor": actor, **asdict(message)} for actor, message in trajectory.record],
        "opening": [asdict(message) for message in trajectory.opening],
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
                "executed": asdict(turn.executed) if turn.executed else None,
            }
            for turn in trajectory.turns
        ],
    }


def from_record(record: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory that `to_record` made these JSON values of. Version 1 had neither domain nor record,
    version 2 no opening.

    Raises:
        LookupError, TypeError, ValueError: it did not make them.
    """
    if record["version"] not in range(1, TRAJECTORY_VERSION + 1):
        raise ValueError(f"version {record['version']}, expected 1 to {TRAJECTORY_VERSION}")
    turns = [
        Turn(
            **turn
            | {
                "action": _action(turn["action"]),
                "executed": _action(turn["executed"]) if turn.get("executed") else None,
                "observation": tuple(map(_message, turn["observation"])),
            }
        )
        for turn in record["turns"]
    ]
    said = record.get("record", ())
    plain = ("task_id", "member", "reward", "reward_parts", "user", "seed", "fault", "tags")
    return Trajectory(
        **{name: record[name] for name in plain},
        turns=turns,
        outcome=Outcome(record["outcome"]),
        stop_reason=StopReason(record["stop_reason"]),
        domain=record.get("domain", ""),
        record=[(item["actor"], _message({k: v for k, v in item.items() if k != "actor"})) for item in said],
        opening=list(map(_message, record.get("opening", ()))),
    )


def write_trajectories(path: Path, groups: Sequence[Group]) -> None:
    """Write a compressed JSONL file, one trajectory a line; it appears whole or not at all.

    Read it with `read_trajectories`, or `zstd -dc FILE | jq`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        json.dumps({"group": i, **to_record(t)}, ensure_ascii=False) + "\n"
        for i, group in enumerate(groups)
        for t in group.members
    )
    data = lines.encode("utf-8", "backslashreplace")  # half a surrogate pair, as JSON writes it
    draft = path.with_name(f".{path.name}")
    draft.write_bytes(zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data))
    draft.rename(path)


def require_writable(path: Path, suffix: str = ".jsonl.zst") -> None:
    """Check before the work that its result can be written: the name, and every folder on the way.

    Raises:
        ValueError: it cannot.
    """
    if not path.name.endswith(suffix) or path.name == suffix:
        raise ValueError(f"{path}: expected a file name that ends in {suffix}. Type, for instance, {path.stem}{suffix}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a file. Type {path}/trajectories{suffix}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: {folder} is no folder you may write to; choose another one")


def read_trajectories(path: Path) -> list[Group]:
    """Read what any version of `write_trajectories` wrote.

    A file that was cut (a full disk, a copy that broke off) gives what is before the cut, with a warning.

    Args:
        path: a file of trajectories; one whose name does not end in ".zst" is taken as plain JSONL.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        near = [str(found) for found in path.parent.glob("*.jsonl*")]
        raise ValueError(f"{path}: no such file, expected trajectories (.jsonl.zst).{did_you_mean(str(path), near)}")
    groups: dict[int, Group] = {}
    lines, cut = _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            trajectory, group = from_record(record), record["group"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if number < len(lines) or not groups:
                what = f"line {number} is no trajectory ({type(error).__name__}: {error})"
                raise ValueError(f"{path}: {what}, expected a file that sinkflex wrote") from None
            cut = True
            break
        groups.setdefault(group, Group(trajectory.task_id, [])).members.append(trajectory)
    if not groups:
        raise ValueError(f"{path}: no episode in it, expected a file that sinkflex wrote")
    if cut:
        whole = sum(len(group.members) for group in groups.values())
        warnings.warn(f"{path} is cut off; the {whole} episodes before the cut are read", stacklevel=2)
    return list(groups.values())


def _lines(path: Path) -> tuple[list[bytes], bool]:
    """Return the lines of a file, and whether it is known to be cut off."""
    data, expected = path.read_bytes(), 0
    if path.suffix == ".zst" and data:
        try:
            expected = zstandard.frame_content_size(data)
            # A reader, unlike `decompress`, gives what is before a cut.
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        except zstandard.ZstdError as error:
            raise ValueError(f"{path}: {error}, expected trajectories compressed with zstd (.jsonl.zst)") from None
    return data.split(b"\n") if not data.endswith(b"\n") else data[:-1].split(b"\n"), len(data) < expected


def _action(values: Mapping[str, Any]) -> Action:
    return Action(**{**values, "tool_calls": _calls(values)})


def _message(values: Mapping[str, Any]) -> Message:
    return Message(**{**values, "tool_calls": _calls(values)})


def _calls(values: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(**call) for call in values["tool_calls"])
