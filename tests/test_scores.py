"""Scores against counting, enumeration, published examples, and runs that differ by nothing but chance."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import numpy as np
import pytest

from sinkflex.envs.env import StopReason
from sinkflex.scores import (
    bootstrap_interval,
    compare,
    mcnemar,
    mean,
    pass_at_k,
    pass_hat_k,
    per_task,
    summarize,
    wilson_interval,
)
from sinkflex.trajectory import Group, Outcome, Trajectory


def episode(
    reward: float | None,
    family: str = "mms",
    fault: str = "server died",
    parts: dict[str, float] | None = None,
    stop: StopReason = StopReason.USER_STOP,
) -> Trajectory:
    outcome = Outcome.INVALID if reward is None else Outcome.SOLVED if reward == 1 else Outcome.FAILED
    cause = fault if reward is None else None
    return Trajectory("t", 0, [], outcome, stop, reward, parts or {}, fault=cause, tags={"family": family})


def run_of(rewards: dict[str, list[float | None]]) -> list[Group]:
    return [Group(task_id, [episode(reward) for reward in column]) for task_id, column in rewards.items()]


@pytest.mark.parametrize(("trials", "solved", "k"), [(4, 2, 1), (4, 2, 2), (5, 5, 3), (5, 0, 2), (4, 3, 4)])
def test_pass_k_equals_the_count_over_all_draws_of_k_trials(trials: int, solved: int, k: int) -> None:
    outcomes = [True] * solved + [False] * (trials - solved)
    draws = list(combinations(outcomes, k))
    assert pass_hat_k(trials, solved, k) == pytest.approx(sum(all(d) for d in draws) / len(draws))
    assert pass_at_k(trials, solved, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


# --- Intervals --------------------------------------------------------------------------------------------------


def test_the_bootstrap_equals_the_enumeration_of_all_resamples() -> None:
    values = [0.0, 0.25, 1.0, 1.0]
    means = sorted(sum(draw) / 4 for draw in product(values, repeat=4))
    low, high = bootstrap_interval(values, level=0.8, resamples=200_000)
    exact = np.quantile(means, [0.1, 0.9])
    assert (low, high) == pytest.approx(tuple(exact), abs=0.02)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("method", ["bootstrap", "wilson"])
def test_an_interval_covers_the_true_mean_about_as_often_as_it_says(method: str, rate: float) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        values = rng.random(60) < rate
        if method == "wilson":
            low, high = wilson_interval(float(values.mean()), 60)
        else:
            low, high = bootstrap_interval(values, resamples=300)
        hits += low <= rate <= high
    floor = 0.9 if method == "wilson" or rate > 0.1 else 0.8  # few events: the bootstrap is known to be short
    assert floor <= hits / 300 <= 0.99


def test_wilson_solves_its_own_equation_and_matches_a_published_example() -> None:
    z = 1.959963984540054
    for rate, n in ((0.3, 40), (1 / 7, 7), (0.5, 1)):
        for bound in wilson_interval(rate, n):  # |rate - p| = z sqrt(p (1 - p) / n)
            assert abs(rate - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n))
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_wilson_says_something_where_the_bootstrap_is_empty() -> None:
    assert bootstrap_interval([1.0] * 8) == (1.0, 1.0)
    low, high = wilson_interval(1.0, 8)
    assert 0.6 < low < 0.7 and high == 1.0


def test_trials_never_make_wilson_too_narrow() -> None:
    rng, hits = np.random.default_rng(1), 0
    for _ in range(300):
        chances = rng.beta(0.5, 0.7, 40)
        observed = rng.binomial(4, chances) / 4
        low, high = wilson_interval(float(observed.mean()), 40)
        hits += low <= 0.5 / 1.2 <= high
    assert hits / 300 >= 0.95


def test_the_mean_does_not_depend_on_the_order() -> None:
    values = [1 / 3, 0.1, 1.0, 1 / 6, 0.7] * 23
    random.Random(0).shuffle(values)
    assert mean(values) == mean(sorted(values)) == mean(sorted(values, reverse=True))


# --- Two runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (0, 6), (7, 3), (4, 4), (1, 9), (12, 5)])
def test_mcnemar_equals_the_count_of_coin_sequences_that_are_as_uneven(better: int, worse: int) -> None:
    n = better + worse
    as_uneven = sum(min(sum(s), n - sum(s)) <= min(better, worse) for s in product((0, 1), repeat=n))
    assert mcnemar(better, worse) == pytest.approx(as_uneven / 2**n)


def test_two_runs_by_hand() -> None:
    ours = run_of({"a": [1, 1], "b": [1, 0], "c": [0, 0], "d": [1, 1], "e": [1, None], "f": [None, None], "g": [1, 1]})
    theirs = run_of({"a": [0, 0], "b": [0, 0], "c": [1, 0], "d": [1, 1], "e": [0, 0], "f": [1, 1], "h": [1, 1]})
    result = compare(ours, theirs)
    assert (result["tasks"], result["better"], result["worse"], result["equal"]) == (5, 3, 1, 1)
    assert result["difference"] == pytest.approx((1 + 0.5 - 0.5 + 0 + 1) / 5)
    assert result["p_value"] == 2 * (1 + 4) / 16
    assert result["unpaired"] == ["f", "g", "h"]
    assert result["interval"][0] <= result["difference"] <= result["interval"][1]
    back = compare(theirs, ours)
    assert back["difference"] == -result["difference"] and back["p_value"] == result["p_value"]
    with pytest.raises(ValueError, match="no scored task in common"):
        compare(run_of({"a": [1]}), run_of({"b": [1]}))


def test_a_shuffled_pairing_loses_significance() -> None:
    """Tasks differ much in difficulty, the runs a little: only the pairing shows it."""
    rng = random.Random(0)
    tasks = [f"task_{i}" for i in range(60)]
    base = {task: [float(i < 25)] for i, task in enumerate(tasks)}
    trained = {task: [float(i < 34)] for i, task in enumerate(tasks)}
    paired = compare(run_of(trained), run_of(base))
    assert (paired["better"], paired["worse"]) == (9, 0)
    assert paired["p_value"] == pytest.approx(2 / 2**9) and paired["interval"][0] > 0
    lost = covered = 0
    for _ in range(50):
        order = rng.sample(tasks, 60)
        shuffled = compare(
            run_of(trained), run_of({task: base[other] for task, other in zip(tasks, order, strict=True)})
        )
        assert shuffled["difference"] == pytest.approx(paired["difference"])
        lost += shuffled["p_value"] > 0.05
        covered += shuffled["interval"][0] <= 0
    assert lost >= 45 and covered >= 40


@pytest.mark.parametrize("changed", [1, 5, 6, 17, 40, 200])
def test_equal_runs_are_called_different_as_seldom_as_promised(changed: int) -> None:
    """Of equal runs each changed task is better or worse by a coin: the chance of p <= level is at most the level."""
    for level in (0.001, 0.01, 0.05, 0.2):
        alarms = sum(math.comb(changed, k) for k in range(changed + 1) if mcnemar(k, changed - k) <= level)
        assert alarms / 2**changed <= level
        if changed == 200 and level >= 0.01:
            assert alarms / 2**changed >= level / 2, "and not much more seldom"


# --- Tables -----------------------------------------------------------------------------------------------------


def test_an_invalid_episode_counts_nowhere_and_is_listed_by_cause() -> None:
    groups = [Group("a", [episode(1.0), episode(None)]), Group("b", [episode(0.0), episode(0.0)])]
    score = summarize([*groups, Group("c", [episode(None, fault="hung")] * 2)])
    assert score["mean@1"] == 0.5 and score["tasks"] == 2 and score["unscored"] == ["c"]
    assert score["invalid"] == {"server died": 1, "hung": 2}
    assert list(score["pass^k"]) == [1]
    assert score["by_stop_reason"] == {"user_stop": {"mean": 1 / 3, "episodes": 3}}
    empty = summarize([Group("a", [episode(None)])])
    assert empty["tasks"] == 0 and empty["mean@1"] is None and empty["wilson"] is None and empty["turns"] is None


def test_a_table_has_families_parts_stop_reasons_and_pass_k() -> None:
    late = StopReason.MAX_TURNS
    score = summarize(
        [
            Group("a", [episode(1.0, parts={"DB": 1.0, "ACTION": 1.0}), episode(0.0, parts={"DB": 1.0}, stop=late)]),
            Group("b", [episode(1.0, "service"), episode(1.0, "service")]),
        ]
    )
    assert {name: (f["mean@1"], f["tasks"]) for name, f in score["by_family"].items()} == {
        "mms": (0.5, 1),
        "service": (1.0, 1),
    }
    assert score["by_family"]["service"]["wilson"] == list(wilson_interval(1.0, 1))
    assert score["pass^k"] == {1: 0.75, 2: 0.5}
    assert score["pass@k"] == {1: 0.75, 2: 1.0}
    assert score["by_part"] == {"ACTION": {"mean": 1.0, "episodes": 1}, "DB": {"mean": 1.0, "episodes": 2}}
    assert score["by_stop_reason"]["max_turns"] == {"mean": 0.0, "episodes": 1}
    assert score["interval"][0] <= score["mean@1"] <= score["interval"][1]
    assert score["wilson"] == list(wilson_interval(0.75, 2))


def test_groups_of_one_task_are_its_trials() -> None:
    split = [Group("a", [episode(1.0)]), Group("b", [episode(0.0)]), Group("a", [episode(0.0)])]
    whole = [Group("a", [episode(1.0), episode(0.0)]), Group("b", [episode(0.0)])]
    assert summarize(split) == summarize(whole)


def test_each_task_stands_beside_its_floors() -> None:
    groups = run_of({"a": [1, 0, None], "b": [None]})
    rows = per_task(groups, {"do_nothing": {"a": 1.0, "b": 0.0}, "echo": {"a": 0.0}})
    assert rows == [
        {"task": "a", "trials": 3, "invalid": 1, "solved": 1, "mean": 0.5, "do_nothing": 1.0, "echo": 0.0},
        {"task": "b", "trials": 1, "invalid": 1, "solved": 0, "mean": None, "do_nothing": 0.0, "echo": None},
    ]


@pytest.mark.parametrize("n", [1, 40, 200, 977])
def test_an_interval_of_no_success_begins_at_exactly_zero_and_one_of_all_ends_at_one(n: int) -> None:
    assert wilson_interval(0.0, n)[0] == 0.0 < wilson_interval(0.0, n)[1]
    assert wilson_interval(1.0, n)[1] == 1.0 > wilson_interval(1.0, n)[0]
