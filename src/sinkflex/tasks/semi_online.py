"""A score from expert trajectories, and how well it tells the real reward (EMPO, ACL 2026 paper 428, appendix A.3).

With s_i turns that match the expert from the start, on the policy's own history, and t_i calls of the expert:

    PG = mean(s_i / t_i)      TSR = mean(s_i = t_i)      Score = (PG + TSR) / 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinkflex.methods.empo import EMPO
from sinkflex.seeds import generator
from sinkflex.tasks.gold import expert_calls
from sinkflex.trajectory import Group


def semi_online_score(groups: Sequence[Group], method: EMPO) -> dict[str, float]:
    """Return PG, TSR and Score of episodes that were rolled out by the method, whatever its patches.

    Raises:
        ValueError: no episode is valid.
    """
    shares = []
    for t in (t for group in groups for t in group.valid):
        missed = np.flatnonzero(method.levels(t) < 3)
        matched = int(missed[0]) if len(missed) else len(t.turns)
        shares.append(matched / len(expert_calls(t.domain, t.task_id, method.options.diagnose)))
    if not shares:
        raise ValueError("no episode is valid; roll out some, then score them")
    progress, solved = float(np.mean(shares)), float(np.mean([share == 1.0 for share in shares]))
    return {"PG": progress, "TSR": solved, "Score": (progress + solved) / 2}


def agreement(scores: Sequence[float], rewards: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """Return how well scores of checkpoints tell their real rewards: n, R^2, Spearman and its 95% bootstrap interval.

    Args:
        scores, rewards: one of each for a checkpoint; with few checkpoints the interval is wide, so print n.
    """
    x, y = np.asarray(scores, np.float64), np.asarray(rewards, np.float64)
    picks = generator(0, "agreement").integers(0, len(x), (resamples, len(x)))
    drawn = [_correlation(_ranks(x[i]), _ranks(y[i])) for i in picks]
    defined = [value for value in drawn if not np.isnan(value)]
    low, high = np.quantile(defined, [0.025, 0.975]) if defined else (np.nan, np.nan)
    return {
        "n": len(x),
        "r2": _correlation(x, y) ** 2,
        "spearman": _correlation(_ranks(x), _ranks(y)),
        "low": float(low),
        "high": float(high),
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; not a number where one of both is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    size = float(np.sqrt((dx @ dx) * (dy @ dy)))
    return float(dx @ dy) / size if size > 0 else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks; equal values share the mean of theirs."""
    return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2
