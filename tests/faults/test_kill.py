"""A run that is killed at any moment and continued is the run that was never killed, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from disturbed import require_equal

# One process imports everything, then forks a child for each attempt at a run and kills it after some time.
PROGRAM = """
import os, pathlib, random, signal, sys, time
sys.path.insert(0, "tests/faults")
import disturbed, sinkflex.train

make, last, kills = getattr(disturbed, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder = pathlib.Path(sys.argv[4])

def attempt(directory, seconds=None):
    child = os.fork()
    if child == 0:
        sinkflex.train.train(make(directory))
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or (seconds is not None and status == signal.SIGKILL), status
    return status == signal.SIGKILL

started = time.monotonic()
attempt(folder / "whole")
whole = time.monotonic() - started
choose, hits, number = random.Random(0), 0, 0
while hits < kills:
    directory = folder / f"killed_{number}"
    hit = sum(attempt(directory, choose.uniform(0, 0.8 * whole)) for _ in range(1 + number % 3))  # some twice
    attempt(directory)
    print(directory.name, hit, flush=True)
    hits, number = hits + hit, number + 1
"""


@pytest.mark.parametrize(
    ("recipe", "last", "kills"),
    [
        pytest.param("small", 4, 1, marks=pytest.mark.timeout(300)),
        pytest.param("smoke", 10, 30, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_a_killed_run_continues_as_if_nothing_had_happened(recipe: str, last: int, kills: int, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, recipe, str(last), str(kills), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [line.split() for line in done.stdout.splitlines()]
    assert sum(int(hit) for _, hit in runs) >= kills
    for name, _ in runs:
        require_equal(tmp_path / name, tmp_path / "whole", last)
