"""How well EMPO's score tells the real reward, over the checkpoints of a run (ACL 2026 paper 428, appendix A.3).

    sinkflex train recipes/empo.toml
    python benchmarks/semi_online.py runs/empo --out runs/semi_online.jsonl
    python benchmarks/semi_online.py --table --out runs/semi_online.jsonl

For every checkpoint of the runs, the first of which is the warm start: PG, TSR and Score on the 40 test tasks, from
episodes beside the scripted expert without patches; Step, the share of turns on the expert's history that match it; and
the real reward mean@1 of free episodes on the same tasks. All are greedy.
Appends a row a checkpoint; run it again to continue where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from sinkflex.build import make_chat, make_env, make_sampler, set_up_torch
from sinkflex.config import Config
from sinkflex.evaluate import evaluate, open_policy, play
from sinkflex.methods.empo import EMPO
from sinkflex.methods.method import build_method
from sinkflex.recipe import load_config
from sinkflex.rollout.group import Phase, rollout
from sinkflex.tasks.gold import MAX_EXPERT_TURNS
from sinkflex.tasks.semi_online import agreement, semi_online_score
from sinkflex.tasks.suites import scored_tasks
from sinkflex.trajectory import Group

SCORES = ("PG", "TSR", "Score", "Step")
LEAST = 8  # checkpoints below which no agreement is told


def scored(config: Config, model: Path) -> dict[str, Any]:
    """Return the scores of a model folder beside the expert, and its real reward."""
    set_up_torch(config)
    policy, _ = open_policy(config, model)
    chat = make_chat(config, policy, make_env(config))
    sampler = make_sampler(config, policy, chat)
    tasks = [task.task_id for task in scored_tasks(config.env.domain, "test")]

    def beside_the_expert(patches: int) -> tuple[list[Group], EMPO]:
        options = {"diagnose": config.warmup.diagnose, "patches": patches}
        method = build_method("empo", options, config.rollout.max_tokens)
        assert isinstance(method, EMPO)
        phase = Phase("train/test", config.run.seed, 0, policy_version=0, temperature=0.0)  # the expert acts in "train"
        return rollout(tasks, 1, lambda: make_env(config), chat, sampler, phase, hooks=method)[0], method

    guided, method = beside_the_expert(MAX_EXPERT_TURNS)
    hits = np.concatenate([method.levels(t) == 3 for group in guided for t in group.valid])
    real = evaluate(play(config, model, "test"))
    return {
        **semi_online_score(*beside_the_expert(0)),
        "Step": float(hits.mean()),
        "real": real["mean@1"],
        "floors": real["floors"],
        "about": real["about"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the scores of every checkpoint, and how well each tells the real reward, as Markdown."""
    lines = ["| checkpoint | PG | TSR | Score | Step | real mean@1 |", "| --- " * 6 + "|"]
    for row in rows:
        lines.append("| {checkpoint} | {PG:.3f} | {TSR:.3f} | {Score:.3f} | {Step:.3f} | {real:.3f} |".format(**row))
    if len(rows) < LEAST:
        return "\n".join([*lines, "", f"{len(rows)} checkpoints: too few for an agreement, which takes {LEAST}."])
    lines += ["", "| score | checkpoints | R2 | Spearman | 95% interval |", "| --- " * 5 + "|"]
    for name in SCORES:
        found = agreement([row[name] for row in rows], [row["real"] for row in rows])
        numbers = "| {n} | {r2:.3f} | {spearman:.3f} | {low:.3f} to {high:.3f} |".format(**found)
        lines.append(f"| {name} {numbers}")
    return "\n".join([*lines, "", f"Floors: {json.dumps(rows[0]['floors'])}. {rows[0]['about']}."])


def main() -> None:
    """Score what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories of recipes/empo.toml")
    parser.add_argument("--out", type=Path, default=Path("runs/semi_online.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []

    for run in [] if arguments.table else arguments.runs:
        config = load_config(run / "config.toml")
        steps = sorted(run.glob("checkpoints/step_*/model"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
        for model in steps:
            name = f"{run.name}/{model.parent.name}"
            if any(row["checkpoint"] == name for row in rows()):
                continue
            row = {"checkpoint": name, **scored(config, model)}
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(table(rows()))


if __name__ == "__main__":
    main()
