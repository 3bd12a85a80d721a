"""Named task sets of a domain: what is trained on, what is scored."""

from __future__ import annotations

from sinkflex.envs.tau2.tasks import TaskSpec, load
from sinkflex.seeds import generator

HELD_OUT_TASKS = 200


def training_tasks(domain: str, split: str) -> list[TaskSpec]:
    """Return the tasks that are trained on.

    Args:
        domain: of tau2.
        split: a split of the package, or "pool": telecom full without the test tasks, the held-out tasks, and the
            persona siblings of both.
    """
    tasks = load(domain, split)
    if split != "pool":
        return tasks
    held_out = {_problem(task) for task in scored_tasks(domain, "held_out")}
    return [task for task in tasks if _problem(task) not in held_out]


def scored_tasks(domain: str, split: str) -> list[TaskSpec]:
    """Return the tasks of a score.

    Args:
        domain: of tau2.
        split: a split of the package, or "held_out": 200 fixed tasks of telecom full that are no train or test task
            and no persona sibling of one.
    """
    tasks = load(domain, split)
    if split != "held_out":
        return tasks
    picks = generator(0, "held_out").choice(len(tasks), HELD_OUT_TASKS, replace=False)
    return [tasks[i] for i in sorted(picks.tolist())]


def _problem(task: TaskSpec) -> str:
    """What the siblings of a task with other personas share."""
    return task.task_id.partition("[PERSONA:")[0]
