"""Weak to strong: what RL teaches a policy of one layer, transferred to one of three layers without any reward.

    python benchmarks/direct_opd.py --seeds 0 1 2 3 4 --out runs/direct_opd.jsonl
    python benchmarks/direct_opd.py --table --out runs/direct_opd.jsonl
    python benchmarks/direct_opd.py --head-start 6 --set train.steps=6 --out runs/direct_opd_ahead.jsonl

For each seed: a weak policy's warm start and its GRPO are the pair; a strong policy's warm start is the student, whose
arms have equal episodes, fewer than the weak policy's. `plain` imitates the weak policy after RL (its reference is the
student itself), `grpo` sees the rewards, `shuffled` gets the shifts of other tokens, and `likelihood` a pair without
RL: the weak warm start before and after half as many further steps. Scores are greedy means on 200 held-out telecom
tasks, alone from a ticket. That the shift is worth more than a copy shows where the student is ahead of the weak one:
give the student a head start and the weak policy fewer steps. Appends a row an arm and seed; run it again to continue
where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from sinkflex import checkpoint
from sinkflex.config import Config
from sinkflex.evaluate import evaluate, play
from sinkflex.recipe import load_config
from sinkflex.scores import bootstrap_interval
from sinkflex.train import train

RECIPE = Path(__file__).parent.parent / "recipes" / "direct_opd.toml"
ARMS = ("direct", "plain", "grpo", "shuffled", "likelihood")
LOGGED = ("step", "reward/mean", "validation/mean@1", "learner/kl", "direct_opd/reward", "direct_opd/shift_std")
WEAK, STRONG = "model.tiny.layers=1", "model.tiny.layers=3"
STEPS = 6  # of the student


class Student:
    """The runs of one seed, each made when it is first asked for.

    Args:
        folder: holds the runs.
        seed: of every run.
        extra: further changes of the recipe.
        split: the tasks of the scores.
        head_start: steps of GRPO behind the student when it starts, so that it may be ahead of the weak policy.
    """

    def __init__(self, folder: Path, seed: int, extra: list[str], split: str, head_start: int = 0) -> None:
        self.folder, self.seed, self.extra, self.split, self.head_start = folder, seed, extra, split, head_start

    def config(self, name: str, *changes: str) -> Config:
        """Return the recipe of a run."""
        directory = f"run.directory={self.folder}/{name}_{self.seed}"
        fixed = [f"run.seed={self.seed}", directory, "run.threads=1", 'log.writers=["jsonl"]']
        return load_config(RECIPE, [*self.extra, *changes, *fixed])

    def trained(self, name: str, *changes: str) -> Path:
        """Run to the end what is not there yet, and return the run's directory.

        Raises:
            SystemExit: what is there was made with other options, with another head start say.
        """
        config = self.config(name, *changes)
        made = config.run_directory / "config.toml"
        if made.exists() and load_config(made) != config:
            raise SystemExit(f"{made} has other options than what is asked for now: choose another --out")
        train(config).metrics.close()
        return config.run_directory

    def start(self) -> Path:
        """Return the folder of the student before it learns."""
        run = self.trained("strong", STRONG, f"train.steps={self.head_start}")
        return newest(run) if self.head_start else run / "warm_start"

    def pair(self, arm: str) -> tuple[Path, Path]:
        """Return the folders of an arm's teacher and of its reference."""
        weak = self.trained("weak", WEAK)
        before = weak / "warm_start"
        if arm == "plain":
            return newest(weak), self.start()
        if arm == "likelihood":
            steps = self.config("weak", WEAK).warmup.steps
            more = [f"model.path={before}", f"warmup.steps={steps // 2}", "train.steps=0"]
            return self.trained("likelihood_pair", WEAK, *more) / "warm_start", before
        return newest(weak), before

    def arm(self, arm: str) -> Path:
        """Return the folder of the student after an arm."""
        changes = [STRONG, f"model.path={self.start()}", "warmup.steps=0", f"train.steps={STEPS}"]
        if arm == "grpo":
            return newest(self.trained(arm, *changes))
        after, before = self.pair(arm)
        changes += [
            "method.outcome_weight=0.0",
            "method.kl_coefficient=1.0",
            f'method.teachers=["{after}"]',
            f'method.teacher_references=["{before}"]',
        ]
        if arm == "plain":
            changes += ["method.kl_step=0.0"]
        if arm == "shuffled":
            changes += ["method.shuffle_shift=true"]
        return newest(self.trained(arm, *changes))

    def row(self, arm: str) -> dict[str, Any]:
        """Return what is found for an arm."""
        weak = self.trained("weak", WEAK)
        places = {
            "start": self.start(),
            "end": self.arm(arm),
            "weak_start": weak / "warm_start",
            "weak_end": newest(weak),
        }
        scores = {name: self.score(folder) for name, folder in places.items()}
        records = map(json.loads, (self.folder / f"{arm}_{self.seed}" / "metrics.jsonl").read_text().splitlines())
        return {
            "arm": arm,
            "seed": self.seed,
            **{name: score["mean@1"] for name, score in scores.items()},
            "interval": scores["end"]["interval"],
            "steps": [{name: record[name] for name in LOGGED if name in record} for record in records],
            "floors": scores["end"]["floors"],
            "about": scores["end"]["about"],
        }

    def score(self, folder: Path) -> dict[str, Any]:
        """Return the score of a policy; it is written down, since arms share policies."""
        known = self.folder / "_".join([*folder.relative_to(self.folder).parts, f"{self.split}.json"])
        if not known.exists():
            layers = f"model.tiny.layers={json.loads((folder / 'config.json').read_text())['num_hidden_layers']}"
            config = self.config("score", layers)
            known.write_text(json.dumps(evaluate(play(config, folder, self.split))))
        return json.loads(known.read_text())


def newest(run: Path) -> Path:
    """Return the folder of a run's last policy."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None, "train leaves one"
    return found.path / "model"


def table(rows: list[dict[str, Any]]) -> str:
    """Return what each arm gains, and its share of what RL gained the weak policy, as Markdown.

    Intervals are over seeds: a gain needs two.
    """
    lines = ["| arm | seeds | weak | weak after RL | start | end | gain | gap closed |", "| --- " * 8 + "|"]
    for arm in ARMS:
        found = [row for row in rows if row["arm"] == arm]
        if not found:
            continue
        means = {name: np.mean([row[name] for row in found]) for name in ("weak_start", "weak_end", "start", "end")}
        gains = [row["end"] - row["start"] for row in found]
        gain = f"{np.mean(gains):+.3f}"
        if len(gains) > 1:
            gain += " ({:+.3f} to {:+.3f})".format(*bootstrap_interval(gains))
        gap = means["weak_end"] - means["weak_start"]
        closed = f"{np.mean(gains) / gap:.2f}" if gap > 0 else "no gap"
        shown = " | ".join(f"{mean:.3f}" for mean in means.values())
        lines.append(f"| {arm} | {len(found)} | {shown} | {gain} | {closed} |")
    for row in rows[:1]:
        lines += ["", f"Floors: {json.dumps(row['floors'])}. {row['about']}."]
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/direct_opd.jsonl"))
    parser.add_argument("--split", default="held_out", help="tasks of the scores")
    parser.add_argument("--head-start", type=int, default=0, help="steps of GRPO behind the student when it starts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in [] if arguments.table else arguments.seeds:
        student = Student(out.with_suffix(""), seed, arguments.set, arguments.split, arguments.head_start)
        for arm in arguments.arms:
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in rows):
                rows.append(student.row(arm))
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
