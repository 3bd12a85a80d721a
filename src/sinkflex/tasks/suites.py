"""Named task sets of a domain: what is trained on, what is scored."""

from __future__ import annotations

from sinkflex.config import Config
from sinkflex.envs.tau2.tasks import TaskSpec, load
from sinkflex.seeds import generator

HELD_OUT_TASKS = 200


def training_tasks(config: Config) -> list[TaskSpec]:
    """Return the pool a recipe trains on: the official train split, or (telecom) everything apart from the test tasks.

    mock has no splits; all of its tasks serve as train and test.
    """
    if config.env.domain == "mock":
        return load("mock", "base")
    return load(config.env.domain, "pool" if config.tasks.pool == "full" else "train")


def scored_tasks(domain: str, name: str) -> list[TaskSpec]:
    """Return a set that is scored.

    Args:
        domain: of tau2.
        name: "test" or "train" (official splits), or "held_out": 200 fixed tasks of telecom full that are no train or
            test task and no persona sibling of one.

    Raises:
        ValueError: the domain has no such set.
    """
    if domain == "mock":
        return load("mock", "base")
    tasks = load(domain, name)
    if name != "held_out":
        return tasks
    picks = generator(0, "held_out").choice(len(tasks), HELD_OUT_TASKS, replace=False)
    return [tasks[i] for i in sorted(picks.tolist())]
