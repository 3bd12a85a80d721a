"""The comparison of Direct-OPD: its arms have equal episodes and differ in what teaches them; its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sinkflex.config import Config
from sinkflex.methods.direct_opd import DirectOPD
from sinkflex.methods.method import build_method
from tests.methods.small_run import SMALL
from tests.methods.test_comparison import script

weak_to_strong = script("direct_opd")
SIDES = ("teachers", "teacher_references")


def configs(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Config]:
    """The recipes of all runs that the arms ask for, by name; none is run."""
    found: dict[str, Config] = {}

    def noted(student: Any, name: str, *changes: str) -> Path:
        found[name] = student.config(name, *changes)
        return tmp / name

    monkeypatch.setattr(weak_to_strong.Student, "trained", noted)
    monkeypatch.setattr(weak_to_strong, "newest", lambda run: run / "newest")
    student = weak_to_strong.Student(tmp, 3, [], "held_out")
    for arm in weak_to_strong.ARMS:
        student.arm(arm)
    return found


def test_arms_have_equal_episodes_and_only_one_of_them_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = configs(tmp_path, monkeypatch)
    assert set(found) == {"weak", "strong", "likelihood_pair", *weak_to_strong.ARMS}
    for arm in weak_to_strong.ARMS:
        method = build_method(found[arm].method.name, found[arm].method.options, 100)
        assert isinstance(method, DirectOPD)
        assert bool(method.options.outcome_weight) == (arm == "grpo") == (not method.options.teachers)
        assert method.options.shuffle_shift == (arm == "shuffled")
        assert found[arm].model.path == str(tmp_path / "strong" / "warm_start") and not found[arm].warmup.steps
        for section in ("run", "env", "tasks", "rollout", "learner", "train", "validation"):
            ours, theirs = (getattr(found[a], section).model_dump(exclude={"directory"}) for a in (arm, "grpo"))
            assert ours == theirs, section
    assert found["weak"].model.tiny.layers == found["likelihood_pair"].model.tiny.layers == 1
    assert found["strong"].model.tiny.layers == 3
    assert found["weak"].train.steps > found["grpo"].train.steps > 0


def test_teachers_are_the_weak_policy_after_rl_or_what_a_control_puts_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = configs(tmp_path, monkeypatch)
    pairs = {
        arm: tuple(str(Path(found[arm].method.options[side][0]).relative_to(tmp_path)) for side in SIDES)
        for arm in weak_to_strong.ARMS
        if arm != "grpo"
    }
    assert pairs == {
        "direct": ("weak/newest", "weak/warm_start"),
        "shuffled": ("weak/newest", "weak/warm_start"),
        "plain": ("weak/newest", "strong/warm_start"),
        "likelihood": ("likelihood_pair/warm_start", "weak/warm_start"),
    }


def test_the_table_sets_a_gain_against_what_rl_gained_the_weak_policy() -> None:
    rows = [
        {"arm": "direct", "seed": seed, "weak_start": 0.1, "weak_end": 0.5, "start": 0.2, "end": 0.4 + seed / 5}
        | {"floors": {"do_nothing": 0.0}, "about": "no user"}
        for seed in (0, 1)
    ]
    text = weak_to_strong.table(rows)
    assert "| direct | 2 | 0.100 | 0.500 | 0.200 | 0.500 | +0.300 (+0.200 to +0.400) | 0.75 |" in text
    assert text.endswith('Floors: {"do_nothing": 0.0}. no user.')
    assert "+0.200 | 0.50 |" in weak_to_strong.table(rows[:1]), "one seed has no interval"


def test_a_folder_of_other_options_is_not_continued(tmp_path: Path) -> None:
    small = [*SMALL, "rollout.groups=2"]
    student = weak_to_strong.Student(tmp_path, 0, small, "base")
    changes = ["train.steps=1", "env.solo=false"]
    run = student.trained("strong", *changes)
    assert student.trained("strong", *changes) == run, "what is there is taken as it is"
    with pytest.raises(SystemExit, match=r"strong_0/config.toml has other options .* choose another --out"):
        student.trained("strong", *changes, "learner.warmup_steps=7")
