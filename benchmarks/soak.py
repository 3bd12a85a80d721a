"""A long run of the smoke recipe: memory and open descriptors after every hundredth of it.

    python benchmarks/soak.py                 2,000 steps, some hours on one core
    python benchmarks/soak.py --steps 30      is it still going?
    python benchmarks/soak.py --set method.entropy_coefficient=1e-3 --set method.kl_coefficient=0.05

Few groups of the smoke recipe have varied rewards; with the third command each step moves the weights.
Prints a table and whether the bars are met: after a tenth of the run, memory stays within 5% of what it was then, and
no descriptor is added.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sinkflex.recipe import load_config
from sinkflex.train import train

GROWTH = 1.05


def main() -> None:
    """Run, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows: list[dict[str, int]] = []

    with tempfile.TemporaryDirectory() as folder:

        def look() -> bool:
            """Called after every step; never stops the run."""
            step = sum(1 for _ in (Path(folder) / "metrics.jsonl").open()) - config.warmup.steps - 1
            if step > 0 and step % max(1, options.steps // 100) == 0:
                rows.append({"step": step, "resident_bytes": resident_bytes(), "descriptors": descriptors()})
            return False

        overrides = [f"run.directory={folder}", f"train.steps={options.steps}", 'log.writers=["jsonl","tensorboard"]']
        config = load_config("recipes/smoke.toml", [*overrides, *options.set])
        train(config, look)
    settled = rows[len(rows) // 10 :]
    growth = max(row["resident_bytes"] for row in settled) / settled[0]["resident_bytes"]
    added = max(row["descriptors"] for row in settled) - settled[0]["descriptors"]
    met = growth <= GROWTH and added <= 0
    if options.json:
        print(json.dumps({"rows": rows, "growth": growth, "descriptors_added": added, "met": met}))
    else:
        for row in rows:
            size = f"{row['resident_bytes'] / 2**20:7.1f} MiB"
            print(f"step {row['step']:>5}  {size}  {row['descriptors']:>4} descriptors")
        print(f"memory x {growth:.3f} (at most {GROWTH}), descriptors {added:+d}: {'met' if met else 'MISSED'}")
    sys.exit(0 if met else 1)


def resident_bytes() -> int:
    """Memory of this process now."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd"))


if __name__ == "__main__":
    main()
