from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from sinkflex.envs.env import Action, StopReason
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.method import build_method
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn


def group(rewards: list[float | None], lengths: list[int] | None = None) -> Group:
    members = []
    for i, reward in enumerate(rewards):
        n = lengths[i] if lengths else 2
        turn = Turn([1], list(range(n)), [0.0] * n, 0, Action(text="x"))
        outcome = Outcome.INVALID if reward is None else Outcome.FAILED
        members.append(Trajectory("t", i, [turn], outcome, StopReason.USER_STOP, reward))
    return Group("t", members)


def values(rewards: list[float | None], **options: object) -> list[float]:
    advantages = GRPO(dict(options), 100).advantages(group(rewards))
    assert all(np.ptp(a) == 0 for a in advantages), "all tokens of an episode carry its advantage"
    return [float(a[0]) for a in advantages]


def test_advantages_by_hand() -> None:
    std = np.std([1, 0, 0, 1], ddof=1)
    np.testing.assert_allclose(values([1.0, 0.0, 0.0, 1.0]), np.array([0.5, -0.5, -0.5, 0.5]) / std, rtol=1e-4)
    np.testing.assert_allclose(values([1.0, 0.0, 0.5], advantage_scale="none"), [0.5, -0.5, 0.0])
    others = values([1.0, 0.0, 0.5], advantage_scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(others, [1 - 0.25, 0 - 0.75, 0.5 - 0.5])


def test_advantages_sum_to_zero_and_ignore_a_shift_and_a_scale_of_the_rewards() -> None:
    rewards = [0.3, 0.9, 0.1, 0.4]
    base = values(rewards)
    assert sum(base) == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(values([3 * r + 7 for r in rewards]), base, rtol=1e-4)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, 0.0], [1.0], [0.7]])
def test_a_group_of_one_or_without_variance_has_advantage_zero(rewards: list[float | None]) -> None:
    assert values(rewards) == [0.0] * len(rewards)


def test_an_invalid_member_moves_no_sibling_and_gets_nothing() -> None:
    assert values([1.0, None, 0.0, 0.0]) == values([1.0, 0.0, 0.0])
    assert values([None, 1.0]) == [0.0]


def test_episodes_count_once_however_long_they_are() -> None:
    advantages = GRPO({}, 100).advantages(group([1.0, 0.0], [1, 50]))
    assert [len(a) for a in advantages] == [1, 50]
    assert float(advantages[0][0]) == -float(advantages[1][0])


def test_the_control_keeps_the_advantages_of_a_group_and_forgets_whose_they_are() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    honest = values(rewards)
    winners = set()
    for seed in range(60):
        shuffled = group(rewards)
        shuffled.members[0].seed = seed
        got = [float(a[0]) for a in GRPO({"shuffle_advantages": True}, 100).advantages(shuffled)]
        np.testing.assert_allclose(sorted(got), sorted(honest))
        winners.add(int(np.argmax(got)))
    assert winners == set(range(8))


def test_an_unknown_method_or_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean grpo"):
        build_method("grpoo", {}, 1)
    with pytest.raises(ValueError, match="clip_high"):
        build_method("grpo", {"clip_hihg": 0.3}, 1)


def test_a_method_outside_the_repo_is_found_by_its_path() -> None:
    assert isinstance(build_method("sinkflex.methods.grpo:GRPO", {}, 1), GRPO)
    with pytest.raises(ValueError, match="cannot be imported"):
        build_method("no_such_module:X", {}, 1)
    with pytest.raises(ValueError, match="not a subclass"):
        build_method("sinkflex.trajectory:Row", {}, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction_low": 0.1}, "method.correction_low does nothing without a correction"),
        ({"kl_estimator": "k1"}, "method.kl_estimator does nothing while method.kl_coefficient is 0"),
        ({"dual_clip": 0.5}, "method.dual_clip = 0.5, expected more than 1"),
        ({"dual_clip": 3.0, "surrogate": "cispo"}, "method.dual_clip does nothing"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_method("grpo", options, 1)


def test_the_presets_of_the_documents_are_what_a_recipe_takes() -> None:
    text = Path("docs/methods.md").read_text(encoding="utf-8").partition("### Presets")[2].partition("\n## ")[0]
    presets = [tomllib.loads(block)["method"] for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    assert len(presets) == 5
    assert all(build_method("grpo", options, 100) for options in presets)
