"""Suites: the tasks of a domain, cut into splits with roles, and the firewall between a run and what it never sees.

    train      may be trained on
    holdout    scores the run while it trains; never trained on
    sealed     every split of a suite that the run does not train on: opens for a finished run, and leaves a record

The roles of a run's own suite are in `config.SPLITS`. The firewall follows arXiv 2608.00181: the score on a sealed
suite chooses no option, no checkpoint and no end of training, and its reader sees how often the suite was opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkflex.config import OWN_SPLITS, SPLITS, Role
from sinkflex.envs.own import is_own, own_environment
from sinkflex.envs.tau2.infeasible import SUFFIX
from sinkflex.envs.tau2.tasks import TaskSpec, buildable, checked_domain, load, nearest, spec
from sinkflex.recipe import load_config
from sinkflex.seeds import generator

HELD_OUT_TASKS = 200
OPENINGS = "sealed.jsonl"


def in_suite(suite: str) -> list[str]:
    """Return the overrides that put another suite into a recipe."""
    domain = domain_of(suite)
    return [f"env.domain={domain}", f"tasks.split={next(iter(SPLITS[domain]))}", "validation.extra=[]"]


def domain_of(suite: str) -> str:
    """Return the domain of a suite's name: "retail" of "tau2/retail".

    Raises:
        ValueError: there is no such suite.
    """
    names = [f"tau2/{domain}" for domain in SPLITS]
    if suite not in names:
        raise ValueError(f"there is no suite {suite!r}; {nearest(suite, names)}. Suites: {', '.join(names)}.")
    return suite.partition("/")[2]


def role(domain: str, split: str, trained: str | None = None) -> Role:
    """Return the role of a split for a run that trains on the domain `trained` (None: on this one).

    Raises:
        ValueError: no such domain or split.
    """
    roles = _roles(domain)
    if split not in roles:
        raise ValueError(f"{domain} has no split {split!r}; {nearest(split, roles)}. Splits: {', '.join(roles)}.")
    return roles[split] if trained in (None, domain) else "sealed"


def training_tasks(domain: str, split: str, exclude: Sequence[str] = (), solo: bool = False) -> list[TaskSpec]:
    """Return the tasks that are trained on.

    Args:
        domain: of tau2.
        split: one whose role is train. `pool` is telecom full without the test tasks, the held-out tasks, and the
            persona siblings of both.
        exclude: verdicts of `tasks/audit.py`; tasks with such a fault are left out.
        solo: as in training; the audit plays the tasks in the same way.

    Raises:
        ValueError: a split for scores, or no task is left.
    """
    if role(domain, split) != "train":
        trained = " or ".join(f'"{name}"' for name, its_role in _roles(domain).items() if its_role == "train")
        raise ValueError(f"{domain} {split} is {role(domain, split)}: no training on it. Type tasks.split = {trained}.")
    tasks = _tasks(domain, split)
    if not exclude:
        return tasks
    from sinkflex.tasks.audit import audit  # plays episodes: imports torch

    faults = audit(domain, [task.task_id for task in tasks], solo, exclude)
    kept = [task for task, found in zip(tasks, faults, strict=True) if not found.faults.keys() & set(exclude)]
    if not kept:
        raise ValueError(
            f"tasks.exclude = {json.dumps(list(exclude))} leaves none of the {len(tasks)} tasks of {domain} {split}. "
            f"Take a verdict out; `sinkflex tasks audit tau2/{domain}` counts them."
        )
    return kept


def infeasible_tasks(domain: str, tasks: Sequence[Any]) -> list[TaskSpec]:
    """Return the infeasible forms of tasks (`envs/tau2/infeasible.py`), as many as have one; of one's own none."""
    if domain not in SPLITS:
        return []
    return [spec(domain, t.task_id + SUFFIX) for t in tasks if buildable(domain, t.task_id)]


def scored_tasks(domain: str, split: str) -> list[TaskSpec]:
    """Return the tasks of a score.

    Args:
        domain: of tau2.
        split: any. `held_out` is 200 fixed tasks of telecom full that are no train or test task and no persona sibling
            of one.

    Raises:
        ValueError: no such domain or split.
    """
    role(domain, split)
    return _tasks(domain, split)


def open_sealed(run: Path, checkpoint: Path, domain: str, split: str) -> dict[str, Any] | None:
    """Before a split is scored: record it in the run's directory if it is sealed for this run.

    Args:
        run: a run directory, or a folder that is none: nothing is sealed for it.
        checkpoint: the checkpoint that is scored.
        domain: of the suite.
        split: of the suite.

    Returns:
        None if it is not sealed. Else suite, split, checkpoint, the SHA-256 of the checkpoint's list of hashes and of
        the run's config, and how often it was opened before, with this checkpoint and with others.

    Raises:
        ValueError: it is sealed, and the run has not come to its end.
    """
    if not (run / "config.toml").is_file() or not (checkpoint / "SHA256SUMS").is_file():
        return None
    config = load_config(run / "config.toml")
    if role(domain, split, config.env.domain) != "sealed":
        return None
    done = max(int(path.name.rpartition("_")[2]) for path in checkpoint.parent.glob("step_*"))
    if done < config.train.steps:
        raise ValueError(
            f"tau2/{domain} is sealed for a run on {config.env.domain}: it opens when the run is finished, and this "
            f"one is at step {done} of {config.train.steps}. Type: sinkflex train {run / 'config.toml'}"
        )
    record = {
        "suite": f"tau2/{domain}",
        "split": split,
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": _sha256(checkpoint / "SHA256SUMS"),
        "config_sha256": _sha256(run / "config.toml"),
    }
    path = run / OPENINGS
    earlier = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    before = [one["checkpoint_sha256"] for one in earlier if (one["suite"], one["split"]) == (f"tau2/{domain}", split)]
    same = before.count(record["checkpoint_sha256"])
    return {**record, "opened_before": same, "opened_before_with_others": len(before) - same}


def _roles(domain: str) -> dict[str, Role]:
    return OWN_SPLITS if is_own(domain) else SPLITS[checked_domain(domain)]


def _tasks(domain: str, split: str) -> list[TaskSpec]:
    if is_own(domain):
        return list(own_environment(domain).tasks(split))
    if split not in ("pool", "held_out"):
        return load(domain, split)
    full, test = load(domain, "full"), _problems(load(domain, "test"))
    if split == "held_out":
        seen = test | _problems(load(domain, "train"))
        choices = [task for task in full if _problem(task) not in seen]
        picks = generator(0, "held_out").choice(len(choices), HELD_OUT_TASKS, replace=False)
        return [choices[i] for i in sorted(picks.tolist())]
    scored = test | _problems(_tasks(domain, "held_out"))
    return [task for task in full if _problem(task) not in scored]


def _problems(tasks: list[TaskSpec]) -> set[str]:
    return {_problem(task) for task in tasks}


def _problem(task: TaskSpec) -> str:
    """What the siblings of a task with other personas share."""
    return task.task_id.partition("[PERSONA:")[0]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
