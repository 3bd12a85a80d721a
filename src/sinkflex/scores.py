"""Numbers one can trust: means with intervals, pass^k and pass@k, invalid episodes apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Outcome


def pass_hat_k(trials: int, solved: int, k: int) -> float:
    """Chance that k trials drawn without replacement are all solved: C(solved, k) / C(trials, k) (tau-bench)."""
    return comb(solved, k) / comb(trials, k)


def pass_at_k(trials: int, solved: int, k: int) -> float:
    """Chance that at least one of k trials drawn without replacement is solved (arXiv 2107.03374)."""
    return 1.0 - comb(trials - solved, k) / comb(trials, k)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, resamples: int = 10_000) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean over tasks; the same values give the same interval.

    Args:
        values: at least one.
        level: of confidence.
        resamples: bootstrap samples.
    """
    array = np.asarray(values, np.float64)
    picks = generator(0, "bootstrap").integers(0, len(array), (resamples, len(array)))
    means = array[picks].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summarize(groups: Sequence[Group]) -> dict[str, Any]:
    """Turn evaluated groups (one a task, its members are the trials) into a table.

    Returns:
        mean@1 (mean reward over tasks, each the mean of its valid trials), its 95% interval, pass^k and pass@k for each
        k up to the least number of valid trials, means by family, counts by stop reason, and invalid episodes by cause.
        What has no valid episode to stand on is None.
    """
    scored = [g for g in groups if g.valid]
    per_task = [float(np.mean([float(t.reward or 0.0) for t in g.valid])) for g in scored]
    least = min((len(g.valid) for g in scored), default=0)
    counts = [(len(g.valid), sum(t.outcome is Outcome.SOLVED for t in g.valid)) for g in scored]
    families: dict[str, list[float]] = {}
    for group, value in zip(scored, per_task, strict=True):
        families.setdefault(str(group.valid[0].tags.get("family", "all")), []).append(value)
    trajectories = [t for g in groups for t in g.members]
    valid = [t for t in trajectories if t.valid]
    return {
        "mean@1": float(np.mean(per_task)) if per_task else None,
        "interval": list(bootstrap_interval(per_task)) if per_task else None,
        "tasks": len(scored),
        "trials": max((len(g.members) for g in groups), default=0),
        "pass^k": {k: float(np.mean([pass_hat_k(n, c, k) for n, c in counts])) for k in range(1, least + 1)},
        "pass@k": {k: float(np.mean([pass_at_k(n, c, k) for n, c in counts])) for k in range(1, least + 1)},
        "by_family": {name: [float(np.mean(values)), len(values)] for name, values in sorted(families.items())},
        "stop_reasons": dict(sorted(Counter(str(t.stop_reason) for t in valid).items())),
        "turns": float(np.mean([len(t.turns) for t in valid])) if valid else None,
        "invalid": dict(Counter(t.fault or "unknown" for t in trajectories if not t.valid)),
        "users": sorted({t.user for t in trajectories}),
    }
