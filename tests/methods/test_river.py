from __future__ import annotations

import numpy as np
import pytest

from sinkflex.behavior import area_under_curve, behavior, jaccard, parts, repeated, report
from sinkflex.envs.env import Message, ToolCall
from sinkflex.learner.rows import rows_of
from sinkflex.learner.step import count
from sinkflex.methods.method import build_method
from sinkflex.methods.river import River
from sinkflex.trajectory import Group, Turn
from tests.methods.episodes import episode, turn


def say(text: str, back: str) -> Turn:
    return turn(2, text=text, back=back)


LOOP = say("please check the line again now", "the line is down")
CASES = {
    "an exact loop": ([LOOP] * 2, [0, 0.05]),
    "the same command with new output": ([LOOP, say("please check the line again now", "all is well today")], [0, 0]),
    "another command with the same output": ([LOOP, say("reboot", "the line is down")], [0, 0]),
    "the cap": ([LOOP] * 6, [0, 0.05, 0.05, 0.05, 0, 0]),
    "a paraphrase below the threshold": (
        [LOOP, say("please check the line once more now", "the line is down")],
        [0, 0],
    ),
    "nothing in the first turn": ([LOOP], [0]),
    "a loop over two turns": ([LOOP, say("reboot", "done"), LOOP], [0, 0, 0.05]),
    "nothing said, nothing heard": ([say("", ""), say("", "")], [0, 0.05]),
}


@pytest.mark.parametrize("case", CASES)
def test_penalties_by_hand(case: str) -> None:
    turns, wanted = CASES[case]
    np.testing.assert_allclose(River({}, 100).penalties(episode(turns)), wanted, atol=1e-12)


def test_the_penalty_comes_after_normalization() -> None:
    group = Group("t", [episode([LOOP] * 3, 1.0, 0), episode([LOOP], 0.0, 1), episode([LOOP], 0.0, 2)])
    plain = build_method("grpo", {}, 100).advantages(group)
    river = build_method("river", {}, 100).advantages(group)
    np.testing.assert_allclose(river[0], plain[0] - np.repeat([0, 0.05, 0.05], 2), rtol=1e-6)
    before = np.array([1.0 - 0.1, 0.0, 0.0])
    other_order = (before - before.mean()) / (before.std(ddof=1) + 1e-6)
    assert abs(river[0].mean() - other_order[0]) > 0.02
    assert sum(float(a.sum()) for a in river) < sum(float(a.sum()) for a in plain), "the sum of a group falls"


def test_a_group_without_variance_still_learns_not_to_loop() -> None:
    group = Group("t", [episode([LOOP] * 2, 0.0, 0), episode([LOOP], 0.0, 1)])
    looping, other = build_method("river", {}, 100).advantages(group)
    assert looping.tolist() == pytest.approx([0, 0, -0.05, -0.05]) and not other.any()
    rows = rows_of([group], [[looping, other]])
    assert count(rows, count_zero_groups=False).tokens == 6, "the group counts in the denominators"
    assert not any(a.any() for a in build_method("grpo", {}, 100).advantages(group))


def test_an_episode_alone_in_its_group_is_not_trained_on() -> None:
    assert not any(a.any() for a in build_method("river", {}, 100).advantages(Group("t", [episode([LOOP] * 3, 1.0)])))


def test_without_penalty_it_is_grpo_to_the_bit() -> None:
    group = Group("t", [episode([LOOP] * 4, 1.0, 0), episode([LOOP], 0.0, 1), episode([LOOP] * 2, 0.5, 2)])
    pairs = zip(
        build_method("river", {"penalty": 0.0}, 100).advantages(group),
        build_method("grpo", {}, 100).advantages(group),
        strict=True,
    )
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def test_similarity_of_words_and_of_grams() -> None:
    assert jaccard(parts("Check the line"), parts("the LINE check")) == 1.0
    assert jaccard(parts("abcd", grams=True), parts("abce", grams=True)) == pytest.approx(1 / 3)
    assert jaccard(parts(""), parts("")) == 1.0
    near = [say("please check the line now", "ok"), say("please check the lines now", "ok")]
    assert not repeated(near).any() and repeated(near, grams=True).tolist() == [False, True]


def test_behavior_by_hand() -> None:
    read, write = ToolCall("check_network_status"), ToolCall("toggle_airplane_mode")
    failed = Turn([1], [2], [0.0], 0, turn(1, [write]).action, (Message("tool", "Error", error=True),))
    careful = behavior(episode([turn(1, [read]), failed, turn(1, [read], back="Connected.")]))
    assert careful == {"loops": 0.0, "inspect_first": 1.0, "verify": 1.0, "recovery": 1.0}
    hasty = behavior(episode([failed, turn(1, [write]), turn(1, [ToolCall("done")])]))
    assert hasty["inspect_first"] == hasty["verify"] == hasty["recovery"] == 0.0
    assert behavior(episode([turn(1, text="Hi.")])) == {"loops": 0.0}, "what is not defined is left out"


def test_the_area_under_the_curve() -> None:
    assert area_under_curve([3, 1, 2], [True, False, False]) == 1.0
    assert area_under_curve([1, 1], [True, False]) == 0.5
    assert area_under_curve([0, 2, 1], [True, False, True]) == 0.0
    assert area_under_curve([1, 2], [True, True]) is None


def test_the_report_finds_the_behavior_that_goes_with_success() -> None:
    read, write = ToolCall("check_network_status"), ToolCall("toggle_airplane_mode")
    good = [episode([turn(1, [read]), turn(1, [write]), turn(1, [read])], 1.0) for _ in range(20)]
    bad = [episode([turn(1, [write]), turn(1, [read])], 0.0) for _ in range(20)]
    found = report(good + bad)
    assert found["inspect_first"]["auc"] == 1.0 and found["verify"]["auc"] == 0.5
    assert found["together_auc"] == 1.0
    rng = np.random.default_rng(0)
    mixed = [episode(t.turns, float(rng.integers(2))) for t in good + bad]
    assert abs(report(mixed)["together_auc"] - 0.5) < 0.25
