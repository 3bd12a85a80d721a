"""Arithmetic of credit that several methods share.

Shape letters: G siblings, K turns, T sampled tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Trajectory

EPSILON = 1e-6


def standardize(values: np.ndarray) -> np.ndarray:
    """Return (x - mean) / (std + 1e-6) over the first axis, std with G - 1; 0 where there is no variance.

    Args:
        values: [G] or [G, K], finite.
    """
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return np.zeros_like(values)
    scaled = (values - values.mean(0)) / (values.std(0, ddof=1) + EPSILON)
    return np.where(np.ptp(values, axis=0) > 0, scaled, 0.0)


def spread(trajectory: Trajectory, of_turns: np.ndarray) -> np.ndarray:
    """Return [T] float32: every sampled token of a turn gets the turn's number of `of_turns` [K]."""
    return np.repeat(np.asarray(of_turns), [len(turn.action_ids) for turn in trajectory.turns]).astype(np.float32)


def shuffled(group: Group, table: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the numbers [K] of each valid member, those of every turn dealt anew among the members that got there.

    It is the control of methods with credit by turn: what a turn earns has nothing to do with what was done.
    """
    dealt = [np.array(of_turns) for of_turns in table]
    for k in range(max(map(len, dealt), default=0)):
        there = [of_turns for of_turns in dealt if len(of_turns) > k]
        values = generator(group.valid[0].seed, "shuffle", k).permutation([of_turns[k] for of_turns in there])
        for of_turns, value in zip(there, values, strict=True):
            of_turns[k] = value
    return dealt
