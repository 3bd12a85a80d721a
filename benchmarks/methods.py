"""The fair comparison of methods: equal episodes, one warm start for all arms of a seed, scored on 200 held-out tasks.

    python benchmarks/methods.py --seeds 0 1 2 3 4 --jobs 2 --out runs/methods.jsonl
    python benchmarks/methods.py --table --out runs/methods.jsonl

Appends a row an arm, mode (dual: the agent talks to the scripted user; solo: it works alone from a ticket) and seed;
run it again to continue where it stopped. Each run has one thread; `--jobs` run at once. A seed is finished before the
next one begins. Without `--arms` each method runs in one mode: dual, or solo if it needs gold calls; its ablations run
when named. `shuffled` gives the rewards of each group to random members, which must teach nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from sinkflex import checkpoint
from sinkflex.evaluate import evaluate, play
from sinkflex.recipe import load_config
from sinkflex.scores import bootstrap_interval
from sinkflex.train import train

RECIPE = Path(__file__).parent.parent / "recipes" / "bench.toml"
DTAC = ("tasks.sampling=dtac", 'method.correction="token_truncate"')
# Its loss is a sum over an episode, so that the recipe's weight of the KL is shared out to about 100 tokens.
STEPO = ("method.name=stepo", "method.kl_coefficient=3e-4")
EMPO = ("method.name=empo", "method.diagnose=false")  # the expert of the warm start
ARMS: dict[str, tuple[str, ...]] = {
    "start": ("train.steps=0",),
    "grpo": (),
    "shuffled": ("method.shuffle_advantages=true",),
    "gspo": ("method.name=gspo",),
    "stepo": STEPO,
    "river": ("method.name=river",),
    "dtac": DTAC,
    "pats": ("method.name=pats",),
    "seed": ("method.name=seed", "method.analyzer=rule"),
    "tara": ("method.name=tara",),
    "empo": EMPO,
    "toolsrl": ("method.name=toolsrl", "method.tool_steps=5"),
    "uniform": ("tasks.sampling=uniform",),
    "naive": (*STEPO, "method.turn_weight=copy"),
    "stepo_dtac": (*STEPO, *DTAC),
    "tara_local": ("method.name=tara", "method.future_weight=0.0"),
    "tara_no_gate": ("method.name=tara", "method.gate=false"),
    "empo_no_patch": (*EMPO, "method.patches=0"),
    "toolsrl_mixed": ("method.name=toolsrl", "method.mixed=true"),
    "pats_shuffled": ("method.name=pats", "method.shuffle_words=true"),
    "seed_shuffled": ("method.name=seed", "method.analyzer=rule", "method.shuffle_lessons=true"),
}
SOLO_ONLY = ("tara", "tara_local", "tara_no_gate", "empo", "empo_no_patch", "toolsrl", "toolsrl_mixed")
# What runs without `--arms`: every method in one mode, with plain GRPO, the control and the warm start beside it.
DEFAULT = {
    "dual": ("start", "grpo", "shuffled", "gspo", "stepo", "river", "dtac", "pats", "seed"),
    "solo": ("start", "grpo", "shuffled", "tara", "empo", "toolsrl"),
}
MODES = ("dual", "solo")
# Alone, a remedy that was not needed costs a turn more, and ten steps leave room above plain GRPO.
SOLO = ("env.solo=true", "env.max_turns=24", "rollout.max_tokens=1536", "train.steps=10")


def run_arm(arm: str, mode: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Train one arm from the warm start of its seed, and score it."""
    started = time.time()
    directory = folder / f"{arm}_{mode}_{seed}"
    start = [f"model.path={warm_start(mode, seed, folder)}", "warmup.steps=0"]
    config = load_config(RECIPE, [*changes(arm, mode, seed, extra), *start, f"run.directory={directory}"])
    train(config)
    seconds = time.time() - started
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    newest = checkpoint.latest(directory / "checkpoints")
    assert newest is not None, "train leaves one"
    score = evaluate(play(config, newest.path / "model", "held_out"))
    return {
        "arm": arm,
        "mode": mode,
        "seed": seed,
        "held_out": score["mean@1"],
        "interval": score["interval"],
        "curve": [[r["step"], r["validation/mean@1"]] for r in records if "validation/mean@1" in r],
        "rewards": [r["reward/mean"] for r in records if "reward/mean" in r],
        "varied_groups": [r["reward/varied_groups_fraction"] for r in records if "reward/mean" in r],
        "episodes_a_step": config.rollout.groups * config.rollout.group_size,
        "floors": score["floors"],
        "seconds": seconds,
        "about": score["about"],
    }


def warm_up(mode: str, seed: int, folder: Path, extra: list[str]) -> None:
    """Make the warm start that all arms of a seed share."""
    directory = warm_start(mode, seed, folder).parent
    train(load_config(RECIPE, [*fixed(mode, seed, extra), "train.steps=0", f"run.directory={directory}"]))


def warm_start(mode: str, seed: int, folder: Path) -> Path:
    """Return the folder of the policy that all arms of a seed start from."""
    return folder / f"warm_{mode}_{seed}" / "warm_start"


def fixed(mode: str, seed: int, extra: list[str]) -> list[str]:
    """Return what all arms of a seed and mode change in the recipe."""
    alone = SOLO if mode == "solo" else ()
    return [*alone, *extra, f"run.seed={seed}", "run.threads=1", 'log.writers=["jsonl"]']


def changes(arm: str, mode: str, seed: int, extra: list[str]) -> list[str]:
    """Return what an arm changes in the recipe; the later ones count."""
    return [*fixed(mode, seed, extra), *ARMS[arm]]


def pairs(arms: list[str] | None, modes: list[str]) -> list[tuple[str, str]]:
    """Return the (arm, mode) to run: those named, or the default ones."""
    return [(arm, mode) for mode in modes for arm in arms or DEFAULT[mode] if mode == "solo" or arm not in SOLO_ONLY]


def episodes_to_reach(row: dict[str, Any], score: float) -> int | None:
    """Return the episodes after which the validation curve first is at a score."""
    return next((step * row["episodes_a_step"] for step, value in row["curve"] if value >= score), None)


def table(rows: list[dict[str, Any]]) -> str:
    """Return held-out scores, and differences to grpo of the same seed and mode, as Markdown.

    Intervals are over seeds; that of one seed is over its tasks, and that of a difference needs two.
    """
    lines = ["| mode | arm | seeds | held out | to grpo | episodes to grpo's end |", "| --- " * 6 + "|"]
    plain = {(row["mode"], row["seed"]): row for row in rows if row["arm"] == "grpo"}
    for mode, arm in ((mode, arm) for mode in MODES for arm in ARMS):
        found = sorted((row for row in rows if (row["arm"], row["mode"]) == (arm, mode)), key=lambda row: row["seed"])
        pairs = [(row, plain[mode, row["seed"]]) for row in found if (mode, row["seed"]) in plain]
        if not found:
            continue
        scores = [row["held_out"] for row in found]
        held_out = f"{np.mean(scores):.3f} ({{:.3f}} to {{:.3f}})"
        held_out = held_out.format(*(bootstrap_interval(scores) if len(scores) > 1 else found[0]["interval"]))
        gains = [row["held_out"] - base["held_out"] for row, base in pairs]
        gain = f"{np.mean(gains):+.3f}" if gains else ""
        if len(gains) > 1:
            gain += " ({:+.3f} to {:+.3f})".format(*bootstrap_interval(gains))
        reached = [episodes_to_reach(row, base["curve"][-1][1]) for row, base in pairs]
        shown = ", ".join("never" if n is None else str(n) for n in reached)
        lines.append(f"| {mode} | {arm} | {len(found)} | {held_out} | {gain} | {shown} |")
    for row in rows[:1]:
        lines += ["", f"Floors: {json.dumps(row['floors'])}. {row['about']}."]
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="in every mode that they can run in")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/methods.jsonl"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--one", nargs=3, metavar=("ARM", "MODE", "SEED"), help="run this one and print its row")
    arguments = parser.parse_args()
    folder = arguments.out.with_suffix("")
    if arguments.one:
        arm, mode, seed = arguments.one
        if arm == "warm":
            warm_up(mode, int(seed), folder, arguments.set)
        else:
            print(json.dumps(run_arm(arm, mode, int(seed), folder, arguments.set)))
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    def one(arm: str, mode: str, seed: int) -> str:
        command = [sys.executable, __file__, "--one", arm, mode, str(seed), "--out", str(arguments.out)]
        command += [word for change in arguments.set for word in ("--set", change)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    failed: list[subprocess.CalledProcessError] = []
    if not arguments.table:
        done = {(row["arm"], row["mode"], row["seed"]) for row in rows()}
        for seed in arguments.seeds:
            wanted = [(a, m, seed) for a, m in pairs(arguments.arms, arguments.modes) if (a, m, seed) not in done]
            cold = [("warm", m, seed) for m in dict.fromkeys(m for _, m, _ in wanted)]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                list(pool.map(lambda job: one(*job), [c for c in cold if not warm_start(*c[1:], folder).exists()]))
                for future in as_completed([pool.submit(one, *job) for job in wanted]):
                    try:
                        line = future.result().splitlines()[-1]
                    except subprocess.CalledProcessError as error:
                        failed.append(error)  # the others go on
                        continue
                    with arguments.out.open("a") as file:
                        file.write(line + "\n")
    print(table(rows()))
    if failed:
        sys.exit("\n".join(map(str, failed)))


if __name__ == "__main__":
    main()
