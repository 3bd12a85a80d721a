"""Numbers one can trust: means with intervals, pass^k and pass@k, invalid episodes apart, two runs task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb, fsum, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Outcome, Trajectory

LEVEL = 0.95
RESAMPLES = 10_000


def pass_hat_k(trials: int, solved: int, k: int) -> float:
    """Chance that k trials drawn without replacement are all solved: C(solved, k) / C(trials, k) (tau-bench)."""
    return comb(solved, k) / comb(trials, k)


def pass_at_k(trials: int, solved: int, k: int) -> float:
    """Chance that at least one of k trials drawn without replacement is solved (arXiv 2107.03374)."""
    return 1.0 - comb(trials - solved, k) / comb(trials, k)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value, rounded once: the order of the values does not matter."""
    return fsum(values) / len(values)


def bootstrap_interval(
    values: Sequence[float], level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean over tasks; the same values give the same interval.

    For the difference of two runs give the differences task by task: that is the paired bootstrap.

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


def wilson_interval(rate: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's score interval of a probability (Wilson 1927, JASA 22:209); it is never empty, even at 0 or 1.

    Args:
        rate: observed, in [0, 1]. It may be a mean over tasks of means over trials: such a rate varies less than one
            of single trials, so the interval is then wider than it need be, never narrower.
        n: tasks, at least one.
        level: of confidence.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    center = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and 1 one end is exact, which rounding would miss.
    return max(0.0, center - half) if rate else 0.0, min(1.0, center + half) if rate < 1 else 1.0


def mcnemar(better: int, worse: int) -> float:
    """Return the p-value of McNemar's exact test, two-sided: fair coins as uneven as the tasks that changed.

    p = min(1, 2 * sum of C(n, i) / 2^n over i <= min(better, worse)), n = better + worse.

    Args:
        better: tasks on which only the first run succeeds.
        worse: tasks on which only the second one does.
    """
    n = better + worse
    return min(1.0, 2 * sum(comb(n, i) for i in range(min(better, worse) + 1)) / 2**n)


def summarize(groups: Sequence[Group]) -> dict[str, Any]:
    """Turn evaluated groups (the members of a task's groups are its trials) into numbers.

    Returns:
        mean@1 (mean reward over tasks, each the mean of its valid trials), its bootstrap and its Wilson interval,
        pass^k and pass@k for each k up to the least number of valid trials; the same mean for each family of tasks;
        mean and number of valid episodes for each part of the reward and each stop reason; and, counted nowhere else,
        invalid episodes by cause and the tasks that have no valid one. What has no valid episode is None.
    """
    tasks = _tasks(groups)
    scored = {task_id: valid for task_id, members in tasks.items() if (valid := _valid(members))}
    per_task = [_reward(valid) for valid in scored.values()]
    counts = [(len(valid), _solved(valid)) for valid in scored.values()]
    ks = range(1, min((n for n, _ in counts), default=0) + 1)
    families: dict[str, list[float]] = {}
    for valid, value in zip(scored.values(), per_task, strict=True):
        families.setdefault(str(valid[0].tags.get("family", "all")), []).append(value)
    episodes = [t for members in tasks.values() for t in members]
    valid = _valid(episodes)
    return {
        "mean@1": mean(per_task) if per_task else None,
        "interval": list(bootstrap_interval(per_task)) if per_task else None,
        "wilson": list(wilson_interval(mean(per_task), len(per_task))) if per_task else None,
        "tasks": len(scored),
        "trials": max(map(len, tasks.values()), default=0),
        "pass^k": {k: mean([pass_hat_k(n, c, k) for n, c in counts]) for k in ks},
        "pass@k": {k: mean([pass_at_k(n, c, k) for n, c in counts]) for k in ks},
        "by_family": {
            name: {
                "mean@1": mean(values),
                "wilson": list(wilson_interval(mean(values), len(values))),
                "tasks": len(values),
            }
            for name, values in sorted(families.items())
        },
        "by_part": _means((part, value) for t in valid for part, value in t.reward_parts.items()),
        "by_stop_reason": _means((str(t.stop_reason), _reward([t])) for t in valid),
        "turns": mean([len(t.turns) for t in valid]) if valid else None,
        "invalid": dict(Counter(t.fault or "unknown" for t in episodes if not t.valid)),
        "unscored": [task_id for task_id in tasks if task_id not in scored],
        "users": sorted({t.user for t in episodes}),
    }


def faults_text(groups: Sequence[Group]) -> str:
    """Return how many episodes are invalid, and the commonest cause; an empty string if none is."""
    causes = faults(groups)
    if not causes:
        return ""
    ((cause, count),) = causes.most_common(1)
    episodes = sum(len(group.members) for group in groups)
    return f"{causes.total()} of {episodes} episodes invalid; commonest ({count} times): {cause}"


def faults(groups: Sequence[Group]) -> Counter[str]:
    """Count the invalid episodes by the first line of their cause."""
    episodes = [t for group in groups for t in group.members]
    return Counter((t.fault or "unknown").splitlines()[0][:200] for t in episodes if not t.valid)


def per_task(groups: Sequence[Group], floors: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return one record a task: trials, invalid ones, how many are solved, mean reward, what no skill is paid.

    Args:
        groups: evaluated.
        floors: {agent: {task: reward}}.
    """
    return [
        {
            "task": task_id,
            "trials": len(members),
            "invalid": len(members) - len(valid),
            "solved": _solved(valid),
            "mean": _reward(valid) if valid else None,
            **{name: rewards.get(task_id) for name, rewards in floors.items()},
        }
        for task_id, members in _tasks(groups).items()
        for valid in [_valid(members)]
    ]


def compare(ours: Sequence[Group], theirs: Sequence[Group]) -> dict[str, Any]:
    """Compare two runs on the tasks that both have valid episodes of, task by task.

    A task is the unit, since trials of one task are no independent evidence: a task counts as better if its mean over
    trials is. With one trial that is McNemar's test on solved and failed.

    Returns:
        The mean difference (ours minus theirs) with its paired bootstrap interval, the numbers of better, worse and
        equal tasks, McNemar's exact p-value, and the tasks that only one side has valid episodes of.

    Raises:
        ValueError: no task is common.
    """
    means = [
        {task_id: _reward(valid) for task_id, members in _tasks(groups).items() if (valid := _valid(members))}
        for groups in (ours, theirs)
    ]
    common = [task_id for task_id in means[0] if task_id in means[1]]
    if not common:
        raise ValueError("the two runs have no scored task in common: compare runs on the same suite and split")
    differences = [means[0][task_id] - means[1][task_id] for task_id in common]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return {
        "difference": mean(differences),
        "interval": list(bootstrap_interval(differences)),
        "tasks": len(common),
        "better": better,
        "worse": worse,
        "equal": len(common) - better - worse,
        "p_value": mcnemar(better, worse),
        "unpaired": sorted(means[0].keys() ^ means[1].keys()),
    }


def _tasks(groups: Iterable[Group]) -> dict[str, list[Trajectory]]:
    tasks: dict[str, list[Trajectory]] = {}
    for group in groups:
        tasks.setdefault(group.task_id, []).extend(group.members)
    return tasks


def _valid(members: Iterable[Trajectory]) -> list[Trajectory]:
    return [t for t in members if t.valid]


def _reward(valid: Sequence[Trajectory]) -> float:
    return mean([float(t.reward or 0.0) for t in valid])


def _solved(valid: Iterable[Trajectory]) -> int:
    return sum(t.outcome is Outcome.SOLVED for t in valid)


def _means(values: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    columns: dict[str, list[float]] = {}
    for name, value in values:
        columns.setdefault(name, []).append(value)
    return {name: {"mean": mean(column), "episodes": len(column)} for name, column in sorted(columns.items())}
