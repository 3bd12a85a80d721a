"""A run that is killed at any moment and continued is the run that was never killed, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from disturbed import require_equal


@pytest.mark.parametrize(
    ("recipe", "last", "kills"),
    [
        pytest.param("small", 4, 2, marks=pytest.mark.timeout(300)),
        pytest.param("learning_smoke", 10, 30, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_a_killed_run_continues_as_if_nothing_had_happened(recipe: str, last: int, kills: int, tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("killing.py")), recipe, str(kills), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert sum(line[1] == "killed" for line in lines) == kills
    for name in dict.fromkeys(line[0] for line in lines):
        require_equal(tmp_path / name, tmp_path / "whole", last)
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert any(record.get("learner/gradient_norm", 0) > 0 for record in records), "these runs never learn"
