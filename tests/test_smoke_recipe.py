"""The recipe that a newcomer runs first: it teaches something, and is quick."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from sinkflex.report.transcript import transcript
from sinkflex.trajectory import read_trajectories

RECIPE = "recipes/smoke.toml"


def test_the_smoke_recipe_moves_the_weights_of_a_group_whose_rewards_differ(tmp_path: Path) -> None:
    words = [RECIPE, "--set", f"run.directory={tmp_path}", "--set", "run.threads=1"]
    program = [sys.executable, "-c", "from sinkflex.cli import main; main()", "train", *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record for record in records if record["stage"] == "train" and record["step"] > 0]
    assert len(steps) == tomllib.loads(Path(RECIPE).read_text("utf-8"))["train"]["steps"]
    varied = [step["reward/varied_groups_fraction"] > 0 for step in steps]
    assert sum(varied) >= 3
    assert [step["learner/gradient_norm"] > 0 for step in steps] == varied
    assert next(record for record in records if record["stage"] == "train")["validation/mean@1"] > 0

    text = transcript(read_trajectories(tmp_path / "trajectories" / "step_1.jsonl.zst"))
    assert text.count("=== ") == 16 and "the user's tool: " in text and "parts of the reward: " in text
