"""Which tasks a step trains on: uniform, or where the pass rate says there is something to learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sinkflex.config import TasksConfig
from sinkflex.seeds import generator
from sinkflex.trajectory import Group


class Task(Protocol):
    """What a sampler needs of a task: a name and tags."""

    @property
    def task_id(self) -> str: ...
    @property
    def tags(self) -> Any: ...


class TaskSampler:
    """Draws tasks for a step.

    `uniform` walks through random permutations of the tasks. `variance` draws a bucket (tasks with equal tags) with
    weight max(floor, 4 P (1 - P)), where P is a moving average of the bucket's pass rate, then a task of that bucket:
    the first channel of DTAC (EvoCUA-1.5, arXiv 2607.09773), with buckets where the paper has single tasks.

    Args:
        tasks: the pool.
        config: the `[tasks]` section.
        run_seed: the run's seed.
    """

    def __init__(self, tasks: Sequence[Task], config: TasksConfig, run_seed: int) -> None:
        if not tasks:
            raise ValueError("there is no task to train on: choose another tasks.split")
        self._config = config
        self._seed = run_seed
        self._ids = [task.task_id for task in tasks]
        self._buckets: dict[str, list[str]] = {}
        self._bucket_of: dict[str, str] = {}
        for task in tasks:
            bucket = "/".join(str(task.tags.get(key, "")) for key in config.bucket)
            self._buckets.setdefault(bucket, []).append(task.task_id)
            self._bucket_of[task.task_id] = bucket
        self.pass_rate = dict.fromkeys(self._buckets, 0.5)

    def draw(self, n: int, step: int) -> list[str]:
        """Return n task ids for this step; equal arguments and observations give equal draws."""
        if self._config.sampling == "uniform":
            return [self._uniform(step * n + i) for i in range(n)]
        rng = generator(self._seed, "tasks", step)
        names = list(self._buckets)
        weights = np.array([max(self._config.floor, 4 * p * (1 - p)) for p in self.pass_rate.values()])
        chosen = rng.choice(len(names), size=n, p=weights / weights.sum())
        return [str(rng.choice(self._buckets[names[i]])) for i in chosen]

    def observe(self, groups: Sequence[Group]) -> None:
        """Update the buckets' pass rates from finished groups; invalid members do not count."""
        seen: dict[str, list[float]] = {}
        for group in groups:
            if group.task_id in self._bucket_of:
                rewards = [float(t.reward or 0.0) for t in group.valid]
                seen.setdefault(self._bucket_of[group.task_id], []).extend(rewards)
        for bucket, rewards in seen.items():
            if rewards:
                old = self.pass_rate[bucket]
                self.pass_rate[bucket] = old + self._config.ema * (float(np.mean(rewards)) - old)

    def state_dict(self) -> dict[str, Any]:
        """Return the pass rates."""
        return {"pass_rate": dict(self.pass_rate)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the pass rates of buckets that still exist."""
        self.pass_rate.update({b: p for b, p in state["pass_rate"].items() if b in self.pass_rate})

    def _uniform(self, index: int) -> str:
        epoch, place = divmod(index, len(self._ids))
        order = generator(self._seed, "tasks", "epoch", epoch).permutation(len(self._ids))
        return self._ids[int(order[place])]
