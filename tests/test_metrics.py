"""Metrics have a meaning, are finite, and a resumed run leaves the files of an uninterrupted one."""

from __future__ import annotations

import json
import sys

import pytest

from sinkflex import metrics
from sinkflex.metrics import METRICS, describe, open_metrics, register
from sinkflex.recipe import load_config


@pytest.fixture
def config(tmp_path):
    """A config that writes files only."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[log]\nwriters = ["jsonl"]\n[train]\nsteps = 4\n')
    return load_config(recipe)


def log_steps(log, first: int, last: int) -> None:
    for step in range(first, last):
        log.log("train", step, {"reward/mean": step / 3, "timing/step_seconds": 0.5, "rollout/episodes": 8})


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_metric_has_a_unit_and_a_meaning():
    for name, metric in METRICS.items():
        assert name == name.lower() and "/" in name, name
        assert metric.unit and metric.meaning, name


def test_unknown_name_and_undefined_number_are_refused(config, tmp_path):
    with open_metrics(config, tmp_path) as log:
        with pytest.raises(ValueError, match=r"reward/men is not registered: add it to METRICS"):
            log.log("train", 1, {"reward/men": 1.0})
        with pytest.raises(ValueError, match=r"reward/mean is nan at train step 1"):
            log.log("train", 1, {"reward/mean": float("nan")})
    assert read(tmp_path / "metrics.jsonl") == []


def test_pattern_names_have_a_meaning():
    assert describe("rollout/stop/user_stop").unit == "fraction"
    assert describe("validation/held_out/mean@1") is METRICS["validation/*/mean@1"]


def test_a_registered_name_keeps_its_meaning(monkeypatch):
    monkeypatch.setattr(metrics, "METRICS", dict(METRICS))
    register("gate/mean", "fraction", "mean of the gate")
    register("gate/mean", "fraction", "mean of the gate")
    assert describe("gate/mean").unit == "fraction"
    with pytest.raises(ValueError, match="registered already"):
        register("gate/mean", "nats", "something else")


def test_wall_clock_goes_to_its_own_file(config, tmp_path):
    with open_metrics(config, tmp_path) as log:
        log_steps(log, 0, 2)
    assert read(tmp_path / "metrics.jsonl")[1] == {
        "stage": "train",
        "step": 1,
        "reward/mean": 1 / 3,
        "rollout/episodes": 8,
    }
    assert read(tmp_path / "timing.jsonl")[1] == {"stage": "train", "step": 1, "timing/step_seconds": 0.5}


def test_resume_leaves_the_file_of_an_uninterrupted_run(config, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for directory in (whole, resumed):
        directory.mkdir()
    with open_metrics(config, whole) as log:
        log.log("warmup", 1, {"warmup/loss": 2.0})
        log_steps(log, 0, 5)

    with open_metrics(config, resumed) as log:
        log.log("warmup", 1, {"warmup/loss": 2.0})
        log_steps(log, 0, 3)
        position = json.loads(json.dumps(log.state_dict()))
        log_steps(log, 3, 5)
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"half a li')
    with open_metrics(config, resumed, position) as log:
        assert log.state_dict() == position
        log_steps(log, 3, 5)
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_starting_again_without_a_checkpoint_clears_the_file(config, tmp_path):
    with open_metrics(config, tmp_path) as log:
        log_steps(log, 0, 5)
    with open_metrics(config, tmp_path) as log:
        log_steps(log, 0, 1)
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_records_missing_on_disk_are_said(config, tmp_path):
    with pytest.warns(UserWarning, match="has 0 records, the checkpoint has seen 3"):
        open_metrics(config, tmp_path, {"records": 3, "stage": "train", "step": 3}).close()


def test_a_step_is_logged_once(config, tmp_path):
    with open_metrics(config, tmp_path) as log:
        log_steps(log, 0, 2)
        with pytest.raises(AssertionError, match="logged already"):
            log_steps(log, 1, 2)


def test_console_prints_plain_lines_when_it_is_no_terminal(config, tmp_path, capsys):
    config = config.model_copy(update={"log": config.log.model_copy(update={"writers": ("console",)})})
    with open_metrics(config, tmp_path) as log:
        log.doing("rolling out", 3, 8)
        log.log("train", 1, {"reward/mean": 0.25, "validation/mean@1": 0.5, "rollout/invalid": 0})
        log.log("train", 2, {"reward/mean": 0.3})
        log.log("train", 4, {"reward/mean": 0.375, "rollout/invalid": 2})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "train 1/4  reward 0.25  validation 0.5"
    assert lines[1] == "train 4/4  reward 0.375  invalid 2  left 0:00"


def test_tensorboard_hides_what_is_done_again(config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config.model_copy(update={"log": config.log.model_copy(update={"writers": ("tensorboard",)})})
    with open_metrics(config, tmp_path) as log:
        log.log("warmup", 7, {"warmup/loss": 2.0})
        log_steps(log, 1, 3)
        position = log.state_dict()
        log.log("train", 3, {"reward/mean": 99.0})
    with open_metrics(config, tmp_path, position) as log:
        log_steps(log, 3, 5)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train")).Reload()
    assert [(event.step, round(event.value * 3)) for event in events.Scalars("reward/mean")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    assert len(EventAccumulator(str(tmp_path / "tensorboard" / "warmup")).Reload().Scalars("warmup/loss")) == 1


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_tracker_says_what_to_install(config, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    config = config.model_copy(update={"log": config.log.model_copy(update={"writers": (package,)})})
    with pytest.raises(
        ValueError, match=rf'"{package}", which is not installed\. Type: pip install "sinkflex\[trackers\]'
    ):
        open_metrics(config, tmp_path)
