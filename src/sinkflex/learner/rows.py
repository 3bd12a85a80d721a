"""Trajectories to rows: one a trajectory, or several where a turn forks; each sampled id is trained exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from sinkflex.trajectory import Group, Row, Trajectory, Turn


def rows_of(groups: Sequence[Group], advantages: Sequence[Sequence[np.ndarray]]) -> list[Row]:
    """Build the rows of all valid trajectories.

    Args:
        groups: the rollout phase's groups.
        advantages: for each group and valid member the float32 advantages of its sampled tokens, in order.

    Returns:
        Rows; `trajectory_index` counts valid trajectories over all groups.

    Raises:
        ValueError: a method gave an episode fewer or more advantages than sampled tokens, or one that is not finite.
    """
    rows: list[Row] = []
    trajectory_index = 0
    for group_index, (group, of_members) in enumerate(zip(groups, advantages, strict=True)):
        for trajectory, values in zip(group.valid, of_members, strict=True):
            if np.shape(values) != (trajectory.sampled_tokens,):
                raise ValueError(
                    f"advantages of shape {np.shape(values)} for an episode of {trajectory.sampled_tokens} sampled "
                    "tokens; expected one each: let the method's `advantages` return "
                    "np.full(t.sampled_tokens, a, np.float32) for every valid member t"
                )
            if wrong := np.count_nonzero(~np.isfinite(values)):
                raise ValueError(
                    f"task {trajectory.task_id}, member {trajectory.member}: {wrong} of {len(values)} advantages are "
                    "nan or infinite; let the method's `advantages` return finite ones, 0 where a group has no variance"
                )
            rows += cut(trajectory, values, group_index, trajectory_index)
            trajectory_index += 1
    return rows


def beginning(row: Row, turns: int) -> Row:
    """Return the first turns of a row, as views of its arrays; no tokens if it begins later.

    Args:
        row: turns in order.
        turns: how many turns of the trajectory.
    """
    end = int(np.searchsorted(row.turn_index, turns))
    arrays = {f.name: getattr(row, f.name) for f in fields(row) if isinstance(getattr(row, f.name), np.ndarray)}
    streams = {name: values[:end] for name, values in row.streams.items()}
    return replace(row, **{name: values[:end] for name, values in arrays.items()}, streams=streams)


def cut(trajectory: Trajectory, advantages: np.ndarray, group_index: int, trajectory_index: int) -> list[Row]:
    """Cut one trajectory at its forks.

    Args:
        trajectory: the record.
        advantages: [number of sampled tokens] float32.
        group_index, trajectory_index: where it belongs.
    """
    starts = [0] + [k for k, turn in enumerate(trajectory.turns) if k and turn.forks] + [len(trajectory.turns)]
    rows = []
    used = 0
    for first, last in pairwise(starts):
        turns = trajectory.turns[first:last]
        sampled = sum(len(turn.action_ids) for turn in turns)
        rows.append(_row(turns, first, advantages[used : used + sampled], group_index, trajectory_index))
        used += sampled
    return rows


def _row(turns: Sequence[Turn], first: int, advantages: np.ndarray, group: int, trajectory: int) -> Row:
    length = sum(len(t.prompt_ids) + len(t.action_ids) for t in turns)
    row = Row(
        token_ids=np.zeros(length, np.int64),
        loss_mask=np.zeros(length, bool),
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        policy_version=np.full(length, -1, np.int64),
        turn_index=np.zeros(length, np.int64),
        group_index=group,
        trajectory_index=trajectory,
    )
    at = 0
    for index, turn in enumerate(turns, start=first):
        middle = at + len(turn.prompt_ids)
        end = middle + len(turn.action_ids)
        row.token_ids[at:middle] = turn.prompt_ids
        row.token_ids[middle:end] = turn.action_ids
        row.loss_mask[middle:end] = True
        row.behavior_logprobs[middle:end] = turn.behavior_logprobs
        row.policy_version[middle:end] = turn.policy_version
        row.turn_index[at:end] = index
        at = end
    row.advantages[row.loss_mask] = advantages
    return row
