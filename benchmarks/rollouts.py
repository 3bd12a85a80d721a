"""Rollouts of the main job here and in another checkout, in turn: what a change of the sampler is worth.

    git worktree add ../before 5c89432
    python benchmarks/rollouts.py ../before --start runs/telecom_cpu/warm_start --rounds 3

Each round rolls out `--steps` steps of the recipe, in a process of its own for each side: the other checkout, this one,
and this one with two processes. A step before them is left out of the time. CPU seconds count those of forks too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
SIDES = ("before", "here", "here, 2 processes")


def measure(start: Path, steps: int, processes: int) -> dict[str, float]:
    """Roll out with the package that is imported, which may be an older one; return means a step."""
    from sinkflex.recipe import load_config
    from sinkflex.run import open_run

    with tempfile.TemporaryDirectory() as folder:
        changes = [f"model.path={start}", "warmup.steps=0", "run.threads=1", f"run.directory={folder}"]
        changes += [f"run.processes={processes}"] if processes else []
        config = load_config("recipes/telecom_cpu.toml", [*changes, 'log.writers=["jsonl"]'])
        with open_run(config) as run:
            for step in range(steps + 1):
                run.step = step
                tasks = [draw.task_id for draw in run.tasks.draw(config.rollout.groups, step)]
                run.rollout(tasks, config.rollout.group_size, "train", config.rollout.temperature)
                if step == 0:
                    wall, cpu = time.perf_counter(), sum(os.times()[:4])
            return {"wall": (time.perf_counter() - wall) / steps, "cpu": (sum(os.times()[:4]) - cpu) / steps}


def main() -> None:
    """Measure all sides in turn, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--start", type=Path, default=Path("runs/telecom_cpu/warm_start"), help="the policy's folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", type=int, help="measure the package of this folder alone, on so many processes")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.start, options.steps, options.one)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side, checkout, processes in zip(SIDES, (options.before, HERE, HERE), (0, 1, 2), strict=True):
            command = [sys.executable, str(Path(__file__).resolve()), ".", "--one", str(processes)]
            command += ["--start", str(options.start.resolve()), "--steps", str(options.steps)]
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src"), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    print("side                 wall s a step   CPU s a step   wall, over before   CPU, over before")
    middle = {side: {k: statistics.median(r[k] for r in rows) for k in ("wall", "cpu")} for side, rows in found.items()}
    for side, values in middle.items():
        ratios = [middle["before"][name] / values[name] for name in ("wall", "cpu")]
        print(f"{side:20} {values['wall']:13.2f} {values['cpu']:14.2f} {ratios[0]:19.2f} {ratios[1]:18.2f}")


if __name__ == "__main__":
    main()
