"""How far retail's warm start has come: a run's policy serves practice customers that it has not seen in training.

    python benchmarks/practice.py runs/retail_cpu --count 60

Greedily, from another seed than any recipe's: the same people with other wishes; test tasks are about other people.
Prints how many were recognized, how many had the right order opened, and how many got what they wanted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tau2.data_model.tasks import Action

from sinkflex.build import set_up_torch
from sinkflex.config import Config
from sinkflex.envs.tau2 import practice
from sinkflex.envs.tau2.tasks import read
from sinkflex.evaluate import about, open_policy, roll_out
from sinkflex.recipe import config_of
from sinkflex.rollout.group import Phase
from sinkflex.trajectory import Trajectory

SEED = 10**6
STAGES = ("customers", "recognized", "order opened", "satisfied")


def wish_of(task_id: str) -> Action:
    """Return the one change that a practice customer wants, as the call that makes it."""
    criteria = read("retail", task_id).evaluation_criteria
    assert criteria is not None and criteria.actions
    return criteria.actions[0]


def stages(episode: Trajectory) -> list[str]:
    """Return what was reached."""
    wish = wish_of(episode.task_id)
    calls = [call for turn in episode.turns for call in turn.action.tool_calls]
    told = [message.content for turn in episode.turns for message in turn.observation]
    recognized = any(text.startswith('{"user_id"') for text in told)
    order = wish.arguments.get("order_id")
    opened = any(call.name == "get_order_details" and call.arguments.get("order_id") == order for call in calls)
    reached = (True, recognized, recognized and (opened or order is None), episode.reward == 1.0)
    return [name for name, so in zip(STAGES, reached, strict=True) if so]


def table(episodes: list[Trajectory]) -> str:
    """Return counts by wish as Markdown."""
    counts: dict[str, Counter[str]] = {}
    for episode in episodes:
        for name in (wish_of(episode.task_id).name, "all"):
            counts.setdefault(name, Counter()).update(stages(episode))
    lines = [f"| wish | {' | '.join(STAGES)} |", "| --- " * (len(STAGES) + 1) + "|"]
    return "\n".join(
        [*lines, *(f"| {wish} | {' | '.join(str(counts[wish][s]) for s in STAGES)} |" for wish in sorted(counts))]
    )


def serve(config: Config, source: Path, count: int) -> list[Trajectory]:
    """Let a policy serve customers greedily."""
    set_up_torch(config)
    policy, _ = open_policy(config, source)
    names = [practice.name(SEED, number) for number in range(count)]
    phase = Phase("evaluation/practice", config.run.seed, 0, 0, temperature=0.0, trials=True)
    return [group.members[0] for group in roll_out(config, policy, names, 1, phase)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run, or a Hugging Face folder with --recipe")
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    config = config_of(arguments.source, arguments.recipe, arguments.set)
    assert config is not None, "recorded episodes have no config"
    print(table(serve(config, arguments.source, arguments.count)))
    print(json.dumps({"about": about(config)}))


if __name__ == "__main__":
    main()
