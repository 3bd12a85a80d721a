"""A recipe over seeds, with its controls: the main job, or another. Appends a row an arm and seed; run it again to
continue where it stopped.

    python benchmarks/seeds.py --seeds 0 1 2
    python benchmarks/seeds.py --table
    python benchmarks/seeds.py --recipe recipes/retail_cpu.toml --arms grpo shuffled

Arms: `grpo` is the recipe; `shuffled` gives the rewards of each group to random members, which must teach nothing, and
begins with the warm start of grpo's run of the same seed, where there is one (its minutes leave the warm start out);
`supervised` spends the wall time of grpo's run of the same seed on the warm start alone, with the same demonstrations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from sinkflex import checkpoint
from sinkflex.config import SPLITS
from sinkflex.evaluate import evaluate, play
from sinkflex.recipe import load_config
from sinkflex.train import train

RECIPE = Path(__file__).parent.parent / "recipes" / "telecom_cpu.toml"
ARMS = ("grpo", "shuffled", "supervised")
SCORES = ("warm_start", "test", "test_4_trials", "held_out")


def overrides_of(arm: str, seed: int, rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return what an arm changes in the recipe."""
    if arm == "shuffled":
        start = folder / f"grpo_{seed}" / "warm_start"
        whole = (folder / f"grpo_{seed}" / "checkpoints").exists()  # written after the warm start
        known = [f"model.path={start}", "warmup.steps=0"] if whole else []
        return ["method.shuffle_advantages=true", *known]
    if arm == "supervised":
        twin = next((row for row in rows if row["arm"] == "grpo" and row["seed"] == seed), None)
        if twin is None:
            raise SystemExit(f"the supervised arm needs the wall time of grpo: run --arms grpo --seeds {seed} first")
        steps = round(twin["warmup_steps"] * twin["seconds"] / twin["warmup_seconds"])
        return ["train.steps=0", f"warmup.steps={steps}"]
    return []


def run_arm(
    recipe: Path, arm: str, seed: int, rows: list[dict[str, Any]], folder: Path, extra: list[str]
) -> dict[str, Any]:
    """Train one arm and score it on the test tasks, and on the held-out tasks where the domain has them."""
    directory = folder / f"{arm}_{seed}"
    config = load_config(
        recipe, [*extra, *overrides_of(arm, seed, rows, folder), f"run.seed={seed}", f"run.directory={directory}"]
    )
    spent, started = directory / "seconds", time.time()  # of all parts of a run that was interrupted
    try:
        train(config)
    finally:
        seconds = time.time() - started + (float(spent.read_text()) if spent.exists() else 0.0)
        if directory.exists():
            spent.write_text(str(seconds))
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    timing = [json.loads(line) for line in (directory / "timing.jsonl").read_text().splitlines()]
    scored = [r for r in records if "validation/mean@1" in r]
    newest = checkpoint.latest(directory / "checkpoints")
    assert newest is not None, "train leaves one"
    last = newest.path / "model"
    four = evaluate(play(config, last, "test", trials=4, temperature=1.0))
    one = evaluate(play(config, last, "test"))
    held_out = evaluate(play(config, last, "held_out")) if "held_out" in SPLITS[config.env.domain] else None
    warmup_seconds = seconds - sum(
        t.get("timing/step_seconds", 0) + t.get("timing/validation_seconds", 0) for t in timing
    )
    return {
        "arm": arm,
        "seed": seed,
        "warm_start": scored[0]["validation/mean@1"],
        "test": scored[-1]["validation/mean@1"],
        "test_interval": one["interval"],
        "curve": [[r["step"], r["validation/mean@1"]] for r in scored],
        "test_4_trials": four["mean@1"],
        "test_4_trials_interval": four["interval"],
        "test_pass^4": four["pass^k"].get(4),
        **({"held_out": held_out["mean@1"], "held_out_interval": held_out["interval"]} if held_out else {}),
        "floors": {"test": four["floors"], **({"held_out": held_out["floors"]} if held_out else {})},
        "seconds": seconds,
        "warmup_seconds": warmup_seconds,
        "warmup_steps": config.warmup.steps,
        "steps": config.train.steps,
        "about": four["about"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return median and range over seeds, an arm a line, as Markdown."""
    lines = ["| arm | seeds | " + " | ".join(SCORES) + " | minutes |", "| --- " * (len(SCORES) + 3) + "|"]
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if of_arm:
            columns = [[row[name] for row in of_arm if name in row] for name in SCORES]
            cells = [f"{statistics.median(c):.3f} ({min(c):.3f} to {max(c):.3f})" if c else "" for c in columns]
            minutes = statistics.median(row["seconds"] / 60 for row in of_arm)
            lines.append(f"| {arm} | {len(of_arm)} | " + " | ".join(cells) + f" | {minutes:.1f} |")
    for row in rows[:1]:
        lines += ["", f"Floors: {json.dumps(row['floors'])}. {row['about']}."]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]]) -> str:
    """Return an SVG picture of the validation curves of every arm and seed, with the floors as dotted lines."""
    width, height, left, top = 640, 320, 50, 20
    colors = {"grpo": "#0969da", "shuffled": "#cf222e", "supervised": "#6e7781"}
    last = max(row["curve"][-1][0] for row in rows)

    def x(step: float) -> float:
        return left + (width - left - 110) * step / max(last, 1)

    def y(score: float) -> float:
        return top + (height - top - 40) * (1 - score)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{left} {y(tick)}H{x(last)}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>')
    for name, paid in rows[0]["floors"]["test"].items():
        parts.append(f'<path d="M{left} {y(paid)}H{x(last)}" stroke="#57606a" stroke-dasharray="2 4"/>')
        parts.append(f'<text x="{x(last) + 6}" y="{y(paid) + 4}" fill="#57606a">{name}</text>')
    for row in rows:
        points = [*row["curve"]] if len(row["curve"]) > 1 else [[0, row["curve"][0][1]], [last, row["curve"][0][1]]]
        line = " ".join(f"{x(step):.1f},{y(score):.1f}" for step, score in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colors[row["arm"]]}" stroke-width="2"/>')
        score = points[-1][1]
        parts.append(f'<text x="{x(last) + 6}" y="{y(score) + 4}" fill="{colors[row["arm"]]}">{row["arm"]}</text>')
    label = f"step of {last}; mean@1 on the test tasks"
    parts.append(f'<text x="{(left + x(last)) / 2}" y="{height - 8}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="runs/NAME OF THE RECIPE.jsonl if left out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--plot", type=Path, help="write the curves as an SVG picture")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path("runs") / f"{arguments.recipe.stem}.jsonl"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    if not arguments.table:
        for arm in sorted(arguments.arms, key=ARMS.index):
            for seed in arguments.seeds:
                if not any((row["arm"], row["seed"]) == (arm, seed) for row in rows()):
                    row = run_arm(arguments.recipe, arm, seed, rows(), arguments.out.with_suffix(""), arguments.set)
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print(table(rows()))
    if arguments.plot:
        arguments.plot.write_text(plot(rows()))


if __name__ == "__main__":
    main()
