"""Weak to strong: what RL teaches a policy of one layer, transferred to one of three layers without any reward.

    python benchmarks/direct_opd.py --seeds 0 1 2 3 4 --out runs/direct_opd.jsonl
    python benchmarks/direct_opd.py --table --out runs/direct_opd.jsonl

For each seed: a weak policy's warm start and its GRPO are the pair; a strong policy's warm start is the student, whose
arms have equal episodes. `plain` imitates the weak policy after RL (its reference is the student itself), `grpo` sees
the rewards, `shuffled` gets the shifts of other tokens, and `likelihood` a pair without RL: the weak warm start before
and after half as many further steps. Scores are means on 200 held-out telecom tasks, alone from a ticket. The transfer
proves something only where the student starts above the weak policy. Appends a row an arm and seed; run it again to
continue where it stopped.
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
WEAK, STRONG = "model.tiny.layers=1", "model.tiny.layers=3"


class Student:
    """The runs of one seed, each made when it is first asked for.

    Args:
        folder: holds the runs.
        seed: of every run.
        extra: further changes of the recipe.
        split: the tasks of the scores.
    """

    def __init__(self, folder: Path, seed: int, extra: list[str], split: str) -> None:
        self.folder, self.seed, self.extra, self.split = folder, seed, extra, split

    def config(self, name: str, *changes: str) -> Config:
        """Return the recipe of a run."""
        fixed = [f"run.seed={self.seed}", f"run.directory={self.folder}/{name}_{self.seed}", 'log.writers=["jsonl"]']
        return load_config(RECIPE, [*self.extra, *changes, *fixed])

    def trained(self, name: str, *changes: str) -> Path:
        """Run to the end what is not there yet, and return the run's directory."""
        config = self.config(name, *changes)
        train(config).metrics.close()
        return config.run_directory

    def start(self) -> Path:
        """Return the folder of the student before it learns."""
        return self.trained("strong", STRONG, "train.steps=0") / "warm_start"

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
        changes = [STRONG, f"model.path={self.start()}", "warmup.steps=0"]
        if arm == "grpo":
            return newest(self.trained(arm, *changes))
        after, before = self.pair(arm)
        changes += [
            "method.outcome_weight=0.0",
            "method.kl_coefficient=2.5",
            f'method.teachers=["{after}"]',
            f'method.teacher_references=["{before}"]',
        ]
        if arm == "plain":
            changes += ["method.kl_coefficient=1.0", "method.kl_step=0.0"]
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
        return {"arm": arm, "seed": self.seed, **{name: self.score(folder) for name, folder in places.items()}}

    def score(self, folder: Path) -> float:
        """Return the mean on the tasks of the score; it is written down, since arms share policies."""
        known = self.folder / "_".join([*folder.relative_to(self.folder).parts, f"{self.split}.json"])
        if not known.exists():
            layers = f"model.tiny.layers={json.loads((folder / 'config.json').read_text())['num_hidden_layers']}"
            config = self.config("score", layers)
            known.write_text(json.dumps(evaluate(play(config, folder, self.split))["mean@1"]))
        return json.loads(known.read_text())


def newest(run: Path) -> Path:
    """Return the folder of a run's last policy."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None, "train leaves one"
    return found.path / "model"


def table(rows: list[dict[str, Any]]) -> str:
    """Return what each arm gains, and its share of what RL gained the weak policy, as Markdown."""
    lines = [
        "| arm | seeds | weak | weak after RL | start | end | gain | 95% interval | gap closed |",
        "| --- " * 9 + "|",
    ]
    for arm in ARMS:
        found = [row for row in rows if row["arm"] == arm]
        if not found:
            continue
        means = {name: np.mean([row[name] for row in found]) for name in ("weak_start", "weak_end", "start", "end")}
        gains = [row["end"] - row["start"] for row in found]
        low, high = bootstrap_interval(gains) if len(gains) > 1 else (float("nan"), float("nan"))
        gap = means["weak_end"] - means["weak_start"]
        closed = f"{np.mean(gains) / gap:.2f}" if gap > 0 else "no gap"
        shown = " | ".join(f"{means[name]:.3f}" for name in ("weak_start", "weak_end", "start", "end"))
        lines.append(
            f"| {arm} | {len(found)} | {shown} | {np.mean(gains):+.3f} | {low:+.3f} to {high:+.3f} | {closed} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/direct_opd.jsonl"))
    parser.add_argument("--split", default="held_out", help="tasks of the scores")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in [] if arguments.table else arguments.seeds:
        student = Student(out.with_suffix(""), seed, arguments.set, arguments.split)
        for arm in arguments.arms:
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in rows):
                rows.append(student.row(arm))
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
