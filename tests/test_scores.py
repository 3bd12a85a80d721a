from __future__ import annotations

from itertools import combinations

import pytest

from sinkflex.envs.env import StopReason
from sinkflex.scores import bootstrap_interval, pass_at_k, pass_hat_k, summarize
from sinkflex.trajectory import Group, Outcome, Trajectory


def episode(reward: float | None, family: str = "mms") -> Trajectory:
    outcome = Outcome.INVALID if reward is None else Outcome.SOLVED if reward == 1 else Outcome.FAILED
    fault = "server died" if reward is None else None
    return Trajectory("t", 0, [], outcome, StopReason.USER_STOP, reward, fault=fault, tags={"family": family})


@pytest.mark.parametrize(("trials", "solved", "k"), [(4, 2, 1), (4, 2, 2), (5, 5, 3), (5, 0, 2), (4, 3, 4)])
def test_pass_k_equals_the_count_over_all_draws_of_k_trials(trials: int, solved: int, k: int) -> None:
    outcomes = [True] * solved + [False] * (trials - solved)
    draws = list(combinations(outcomes, k))
    assert pass_hat_k(trials, solved, k) == pytest.approx(sum(all(d) for d in draws) / len(draws))
    assert pass_at_k(trials, solved, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.random(60) < 0.3, resamples=500)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_an_invalid_episode_counts_nowhere_and_is_listed_by_cause() -> None:
    score = summarize([Group("a", [episode(1.0), episode(None)]), Group("b", [episode(0.0), episode(0.0)])])
    assert score["mean@1"] == 0.5
    assert score["invalid"] == {"server died": 1}
    assert list(score["pass^k"]) == [1]
    empty = summarize([Group("a", [episode(None)])])
    assert empty["tasks"] == 0 and empty["mean@1"] is None


def test_a_table_has_families_stop_reasons_and_pass_k() -> None:
    score = summarize(
        [Group("a", [episode(1.0), episode(0.0)]), Group("b", [episode(1.0, "service"), episode(1.0, "service")])]
    )
    assert score["by_family"] == {"mms": [0.5, 1], "service": [1.0, 1]}
    assert score["pass^k"] == {1: 0.75, 2: 0.5}
    assert score["pass@k"] == {1: 0.75, 2: 1.0}
    assert score["stop_reasons"] == {"user_stop": 4}
    assert score["interval"][0] <= score["mean@1"] <= score["interval"][1]
