"""Arithmetic of credit that several methods share.

Shape letters: G siblings, K turns, T sampled tokens of an episode.
"""

from __future__ import annotations

import numpy as np

from sinkflex.trajectory import Trajectory

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
