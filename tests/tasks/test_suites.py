"""Splits keep problems apart, roles keep training off scores, and sealed suites open for finished runs alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sinkflex.config import SPLITS
from sinkflex.recipe import dump_config, load_config
from sinkflex.tasks.suites import OPENINGS, domain_of, open_sealed, role, scored_tasks, training_tasks

SMOKE = "recipes/smoke.toml"


def problems(split: str) -> set[str]:
    return {task.task_id.partition("[PERSONA:")[0] for task in scored_tasks("telecom", split)}


def test_the_two_splits_of_our_own_share_no_problem_with_scored_tasks():
    assert (len(scored_tasks("telecom", "pool")), len(scored_tasks("telecom", "held_out"))) == (2045, 200)
    assert not problems("pool") & (problems("test") | problems("held_out"))
    assert not problems("held_out") & (problems("test") | problems("train"))
    assert problems("train") <= problems("pool")


def test_no_task_is_both_trained_on_and_held_out():
    for domain, splits in SPLITS.items():
        by_role = {
            wanted: {t for s, r in splits.items() if r == wanted for t in scored_tasks(domain, s)}
            for wanted in ("train", "holdout")
        }
        assert not by_role["train"] & by_role["holdout"]


def test_only_splits_with_the_role_train_are_trained_on():
    for domain, splits in SPLITS.items():
        for split, its_role in splits.items():
            if its_role == "train":
                assert training_tasks(domain, split) == scored_tasks(domain, split)
            else:
                with pytest.raises(ValueError, match=f"{domain} {split} is holdout: no training on it"):
                    training_tasks(domain, split)
    with pytest.raises(ValueError, match="telecom has no split 'base'"):
        training_tasks("telecom", "base")


def test_every_split_of_another_suite_is_sealed():
    assert role("retail", "test", "retail") == role("retail", "test") == "holdout"
    assert {role("retail", split, "telecom") for split in SPLITS["retail"]} == {"sealed"}
    with pytest.raises(ValueError, match="'tau2/retail'"):
        domain_of("tau2/retial")


def a_run(directory: Path, done: int, steps: int) -> Path:
    """A run directory whose checkpoints stand at a step."""
    config = load_config(SMOKE, [f"train.steps={steps}"])
    checkpoint = directory / "checkpoints" / f"step_{done}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "SHA256SUMS").write_text(f"{done}")
    (directory / "config.toml").write_text(dump_config(config))
    return checkpoint


def test_a_sealed_suite_opens_for_a_finished_run_only(tmp_path):
    checkpoint = a_run(tmp_path, 3, 10)
    with pytest.raises(ValueError, match="step 3 of 10"):
        open_sealed(tmp_path, checkpoint, "retail", "test")
    assert not (tmp_path / OPENINGS).exists()


def test_every_opening_is_recorded_with_its_hashes_and_told_to_the_next(tmp_path):
    first = a_run(tmp_path, 10, 10)
    seen = [open_sealed(tmp_path, first, "retail", "test") for _ in range(2)]
    assert [(one["opened_before"], one["opened_before_with_others"]) for one in seen] == [(0, 0), (1, 0)]
    second = a_run(tmp_path, 20, 20)
    third = open_sealed(tmp_path, second, "retail", "test")
    assert (third["opened_before"], third["opened_before_with_others"]) == (0, 2)
    assert open_sealed(tmp_path, second, "airline", "test")["opened_before_with_others"] == 0
    records = [json.loads(line) for line in (tmp_path / OPENINGS).read_text().splitlines()]
    assert [one["checkpoint"] for one in records] == ["step_10", "step_10", "step_20", "step_20"]
    assert len({one["checkpoint_sha256"] for one in records}) == len({one["config_sha256"] for one in records}) == 2


def test_the_own_suite_and_a_bare_model_leave_no_record(tmp_path):
    checkpoint = a_run(tmp_path, 10, 10)
    assert open_sealed(tmp_path, checkpoint, "telecom", "held_out") is None
    assert open_sealed(checkpoint, checkpoint, "retail", "test") is None
    assert not (tmp_path / OPENINGS).exists()


LISTED = (
    "import sys; opened = set()\n"
    "sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == 'open' else None)\n"
    "from sinkflex.cli import app\n"
    "app(sys.argv[1:], standalone_mode=False)\n"
    "domains = {path.split('/domains/')[1].split('/')[0] for path in opened if path.endswith('tasks.json')}\n"
    "print('OPENED', *sorted(domains))\n"
)
SMALL = ["train.steps=1", "warmup.steps=0", "env.max_turns=2", "rollout.max_turn_tokens=4"]


def domains_opened_by(*arguments: str, overrides: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Run a command in a process of its own; return what it printed and whose tasks it read."""
    sets = [text for option in overrides for text in ("--set", option)]
    command = [sys.executable, "-c", LISTED, *arguments, *sets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed, _, opened = done.stdout.rpartition("OPENED")
    return printed, opened.split()


@pytest.mark.slow
def test_a_whole_job_opens_the_tasks_of_its_own_suite_alone(tmp_path):
    mock = ["env.domain=mock", "tasks.split=base", "validation.split=base", f"run.directory={tmp_path}"]
    assert domains_opened_by("train", SMOKE, overrides=[*SMALL, *mock])[1] == ["mock"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_score_on_another_suite_opens_it_once_the_run_is_finished(tmp_path):
    directory = f"run.directory={tmp_path}"
    assert domains_opened_by("train", SMOKE, overrides=[*SMALL, directory])[1] == ["telecom"]
    arguments = ("evaluate", str(tmp_path), "--suite", "tau2/mock", "--split", "base", "--json")
    for before in range(2):
        printed, opened = domains_opened_by(*arguments)
        assert opened == ["mock"]
        assert json.loads(printed)["sealed"]["opened_before"] == before
