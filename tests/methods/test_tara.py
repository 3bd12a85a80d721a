from __future__ import annotations

import numpy as np
import pytest

from sinkflex.envs.env import ToolCall
from sinkflex.envs.tau2.actions import agent_tools
from sinkflex.methods.method import build_method
from sinkflex.methods.tara import coverage, turn_advantages
from sinkflex.tasks.gold import gold_calls
from sinkflex.trajectory import Group
from tests.methods.episodes import episode, turn

# K = 4 siblings, T = 3 turns.
TABLE = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]], float)
TASK = "[mms_issue]bad_network_preference|user_abroad_roaming_disabled_off[PERSONA:None]"


def scaled(column: list[float]) -> np.ndarray:
    values = np.array(column)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def brute_force(r: np.ndarray, weight: float, gamma: float, gate: bool) -> np.ndarray:
    """The formula, sum by sum."""
    siblings, turns = r.shape
    result = np.zeros(r.shape)
    later = np.zeros(r.shape)
    for i in range(siblings):
        for t in range(turns):
            for k in range(turns):
                if t + k + 1 < turns:
                    later[i, t] += gamma**k * r[i, t + k + 1]
            later[i, t] *= r[i, t] if gate else 1.0
    for t in range(turns):
        for values, share in ((r[:, t], 1.0), (later[:, t], weight)):
            if values.std() > 0:
                result[:, t] += share * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return result


def test_the_table_by_hand() -> None:
    got = turn_advantages(TABLE, 0.5, 0.5)
    # Turn 1: what comes after is (1 + 0.5, 0 + 0.5, gated, 1 + 0); turn 2: (1, gated, 1, 0); turn 3 has nothing after.
    np.testing.assert_allclose(got[:, 0], scaled([1, 1, 0, 1]) + 0.5 * scaled([1.5, 0.5, 0, 1]), rtol=1e-5)
    np.testing.assert_allclose(got[:, 1], scaled([1, 0, 1, 1]) + 0.5 * scaled([1, 0, 1, 0]), rtol=1e-5)
    np.testing.assert_allclose(got[:, 2], scaled([1, 1, 1, 0]), rtol=1e-5)


def test_without_the_gate_a_failed_turn_earns_what_comes_after_it() -> None:
    free = turn_advantages(TABLE, 0.5, 0.5, gate=False)
    np.testing.assert_allclose(free[:, 0], scaled([1, 1, 0, 1]) + 0.5 * scaled([1.5, 0.5, 1.5, 1]), rtol=1e-5)
    assert free[2, 0] > turn_advantages(TABLE, 0.5, 0.5)[2, 0]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_any_table_equals_the_brute_force_reference(seed: int, gate: bool) -> None:
    rng = np.random.default_rng(seed)
    r = rng.integers(0, 2, (rng.integers(2, 9), rng.integers(1, 8))).astype(float)
    weight, gamma = rng.random(2)
    np.testing.assert_allclose(turn_advantages(r, weight, gamma, gate), brute_force(r, weight, gamma, gate), atol=1e-9)


def test_a_turn_where_all_agree_teaches_nothing_and_every_turn_sums_to_zero() -> None:
    r = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 0]], float)
    local = turn_advantages(r, 0.0, 0.5)
    assert not local[:, 0].any() and not local[:, 2].any()
    np.testing.assert_allclose(turn_advantages(TABLE, 0.5, 0.5).sum(0), 0, atol=1e-9)


def test_one_turn_without_future_is_grpo_to_the_bit() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    group = Group("t", [episode([turn(3)], reward, i) for i, reward in enumerate(rewards)])
    plain = [a[0] for a in build_method("grpo", {}, 100).advantages(group)]
    assert turn_advantages(np.array(rewards)[:, None], 0.0, 0.5)[:, 0].astype(np.float32).tolist() == plain


def gold() -> list[ToolCall]:
    calls = list(gold_calls("telecom", TASK))
    assert [call.name for call in calls] == ["set_network_mode_preference", "enable_roaming", "toggle_roaming"]
    return calls


def test_turns_are_gold_calls_with_what_came_before_them_in_any_order() -> None:
    first, second, third = gold()
    look = ToolCall("check_network_status")
    t = episode([turn(1, [look]), turn(1, [second]), turn(1, [look]), turn(1, [first]), turn(1, [look])], task_id=TASK)
    r, place = coverage(t)
    assert r.tolist() == [1, 1, 0]
    assert place.tolist() == [1, 1, 0, 0, 2], "the end belongs to the gold call that is missing"
    done = episode([turn(1, [first, second]), turn(1, [third]), turn(1, text="done")], task_id=TASK)
    assert coverage(done)[0].tolist() == [1, 1, 1] and coverage(done)[1].tolist() == [0, 2, 2]


def test_the_end_of_an_episode_that_misses_a_call_is_blamed_where_siblings_made_it() -> None:
    first, second, third = gold()
    whole = [turn(2, [first]), turn(3, [second]), turn(1, [third])]
    cut = [turn(2, [first]), turn(2, text="Bye.")]
    group = Group(TASK, [episode(whole, 1.0, 0, TASK), episode(cut, 0.0, 1, TASK)])
    good, bad = build_method("tara", {}, 100).advantages(group)
    assert len(good) == 6 and len(bad) == 4
    assert good[:2].min() > 0 > bad[:2].max(), "the future term tells the two first turns apart"
    assert good[2:].min() > 0 > bad[2:].max()


def test_coverage_pays_a_spammer_and_precision_does_not() -> None:
    calls = gold()
    names = [tool["function"]["name"] for tool in agent_tools("telecom", True)]
    noise = [ToolCall(name) for name in names if name not in {call.name for call in calls}]
    spam = episode([turn(1, noise), turn(1, calls)], task_id=TASK)
    honest = episode([turn(1, [call]) for call in calls], task_id=TASK)
    paid = {weight: [float(coverage(t, weight)[0].mean()) for t in (spam, honest)] for weight in (0.0, 1.0)}
    assert paid[0.0] == [1.0, 1.0]
    assert paid[1.0][1] == 1.0 and paid[1.0][0] < 0.8


def test_the_control_deals_the_credit_of_each_turn_anew_among_the_siblings() -> None:
    calls = gold()
    members = [episode([turn(1, [c]) for c in calls[:n]], float(n == 3), i, TASK) for i, n in enumerate((3, 2, 1, 1))]
    for member in members:
        member.turns.extend([turn(1, text="Bye.")] * (3 - len(member.turns)))
    group = Group(TASK, members)
    plain, dealt = (build_method("tara", o, 100).advantages(group) for o in ({}, {"shuffle_advantages": True}))
    _, place = coverage(members[0])
    assert place.tolist() == [0, 1, 2], "the first one has every turn"
    assert any(a.tolist() != b.tolist() for a, b in zip(plain, dealt, strict=True))
    table = {a[0] for a in plain}
    assert {a[0] for a in dealt} <= table and dealt[0].dtype == np.float32
    again = build_method("tara", {"shuffle_advantages": True}, 100).advantages(group)
    assert [a.tolist() for a in again] == [a.tolist() for a in dealt]
