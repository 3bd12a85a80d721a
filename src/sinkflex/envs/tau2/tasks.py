"""tau2's tasks: the package's splits, and tags. A task is validated only when somebody plays it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tau2.data_model.tasks import Task
from tau2.utils import DATA_DIR

from sinkflex.envs.tau2 import infeasible, practice

DOMAINS = ("telecom", "retail", "airline", "mock")
_TELECOM_ID = re.compile(r"\[(?P<family>\w+)_issue\](?P<faults>.*)\[PERSONA:(?P<persona>\w+)\]")


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task by name, with the facts that tables and samplers need.

    Attributes:
        tags: for telecom {"family": "service" | "mobile_data" | "mms", "faults": int, "persona": "None" | "Easy" |
            "Hard"}, all read off the task id; empty for the other domains.
    """

    domain: str
    task_id: str
    tags: dict[str, Any] = field(default_factory=dict, compare=False)


def load(domain: str, split: str) -> list[TaskSpec]:
    """Return the tasks of a split in the package's order.

    Args:
        domain: one of `DOMAINS`.
        split: a split of the package: `base`, and where they exist `train`, `test`, `small`, `full`. `tasks/suites.py`
            cuts two more from telecom's `full`.

    Raises:
        ValueError: no such domain or split.
    """
    return list(_load(checked_domain(domain), split))


def spec(domain: str, task_id: str) -> TaskSpec:
    """Return one task by name.

    Raises:
        ValueError: the domain has no such task.
    """
    if checked_domain(domain) == "retail" and practice.NAME.fullmatch(task_id):
        return TaskSpec(domain, task_id)
    original = task_id.removesuffix(infeasible.SUFFIX)
    if original not in _texts(domain):
        raise ValueError(
            f"{domain} has no task {task_id!r}; {nearest(task_id, _texts(domain))}. "
            f"List them with sinkflex.envs.tau2.tasks.load({domain!r}, 'base')."
        )
    return TaskSpec(domain, task_id, _tags(original) if domain == "telecom" else {})


@cache
def read(domain: str, task_id: str) -> Task:
    """Return the package's own task object, its infeasible form, or a practice task; shared, so do not change it.

    Raises:
        ValueError: the domain has no such task.
    """
    spec(domain, task_id)
    if practice.NAME.fullmatch(task_id):
        return practice.build(task_id, "\n".join(_texts(domain)[id] for id in _ids(domain, "test")))
    if task_id.endswith(infeasible.SUFFIX):
        return infeasible.build(domain, read(domain, task_id.removesuffix(infeasible.SUFFIX)))
    return Task.model_validate_json(_texts(domain)[task_id])


def buildable(domain: str, task_id: str) -> bool:
    """Return whether a task has an infeasible form."""
    if domain == "telecom":  # its names tell, and to validate two thousand tasks takes seconds
        return infeasible.lockable(task_id)
    return domain == "retail" and bool(infeasible.spoil(domain, read(domain, task_id)))


def checked_domain(domain: str) -> str:
    """Return the domain, or raise ValueError with the nearest name."""
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}; {nearest(domain, DOMAINS)}. Domains: {', '.join(DOMAINS)}.")
    return domain


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the clause of an error message that names the choice closest to a word."""
    matches = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.4)
    return f"the nearest is {matches[0]!r}" if matches else "nothing is close to it"


@cache
def _load(domain: str, split: str) -> tuple[TaskSpec, ...]:
    return tuple(spec(domain, task_id) for task_id in _ids(domain, split))


def _ids(domain: str, split: str) -> list[str]:
    splits = _splits(domain)
    if split not in splits:
        raise ValueError(f"{domain} has no split {split!r}; {nearest(split, splits)}. Splits: {', '.join(splits)}.")
    return splits[split]


@cache
def _splits(domain: str) -> dict[str, list[str]]:
    return json.loads((DATA_DIR / "tau2" / "domains" / domain / "split_tasks.json").read_text("utf-8"))


@cache
def _texts(domain: str) -> dict[str, str]:
    """JSON text of each task by id: telecom's 14 MB are parsed once, and text takes a third of the room of objects."""
    text = (DATA_DIR / "tau2" / "domains" / domain / "tasks.json").read_text("utf-8")
    decoder, texts = json.JSONDecoder(), {}
    start = text.find("{")
    while start >= 0:
        task, end = decoder.raw_decode(text, start)
        texts[task["id"]] = text[start:end]
        start = text.find("{", end)
    return texts


def _tags(task_id: str) -> dict[str, Any]:
    match = _TELECOM_ID.fullmatch(task_id)
    assert match, f"telecom task id of an unknown form: {task_id!r}"
    return {
        "family": match["family"],
        "faults": len(match["faults"].split("|")),
        "persona": match["persona"],
    }
