"""The arms of the main job over seeds: the control has the same start, and an interrupted run its whole time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sinkflex.recipe import load_config
from sinkflex.train import train
from tests.methods.small_run import SMOKE
from tests.methods.test_comparison import script

seeds = script("seeds")
QUICK = [
    "run.threads=1",
    "warmup.steps=3",
    "warmup.demonstrations=4",
    "train.steps=1",
    "rollout.groups=1",
    "env.max_turns=4",
    "validation.extra=[]",
    'log.writers=["jsonl"]',
]


def logged(directory: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text("utf-8").splitlines())
    return [record for record in records if record["stage"] == "train"]


def test_a_control_that_begins_with_the_warm_start_of_grpo_differs_in_its_shuffling_alone(tmp_path: Path) -> None:
    (tmp_path / "grpo_5" / "warm_start").mkdir(parents=True)  # half-written, as far as anybody knows
    assert seeds.overrides_of("shuffled", 5, [], tmp_path) == ["method.shuffle_advantages=true"]

    train(load_config(SMOKE, [*QUICK, "run.seed=5", f"run.directory={tmp_path}/grpo_5"]))
    shuffling, *start = seeds.overrides_of("shuffled", 5, [], tmp_path)
    assert shuffling == "method.shuffle_advantages=true" and len(start) == 2
    train(load_config(SMOKE, [*QUICK, *start, "run.seed=5", f"run.directory={tmp_path}/again"]))
    assert logged(tmp_path / "again") == logged(tmp_path / "grpo_5")
    for name in ("warm_start/model.safetensors", "warm_start/tokenizer.json", "trajectories/step_1.jsonl.zst"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "grpo_5" / name).read_bytes()


def test_the_time_of_a_run_is_that_of_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = {"mean@1": 0.0, "interval": [0.0, 0.0], "pass^k": {}, "floors": {}, "about": ""}
    monkeypatch.setattr(seeds, "play", lambda *_, **__: None)
    monkeypatch.setattr(seeds, "evaluate", lambda _: score)
    first = seeds.run_arm(SMOKE, "grpo", 0, [], tmp_path, QUICK)
    again = seeds.run_arm(SMOKE, "grpo", 0, [], tmp_path, QUICK)  # its row was not written yet, say
    assert again["seconds"] >= first["seconds"] and again["warmup_seconds"] >= first["warmup_seconds"] > 0
