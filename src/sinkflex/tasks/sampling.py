"""Which tasks a step trains on: uniform, where the pass rate says there is something to learn, or DTAC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sinkflex.config import TasksConfig
from sinkflex.scores import wilson_interval
from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Outcome, Trajectory, from_record, to_record

CALIBRATION_EPISODES = 8  # of a task, before its own pass rate may leave it out


class Task(Protocol):
    """What a sampler needs of a task: a name and tags."""

    @property
    def task_id(self) -> str: ...
    @property
    def tags(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """A task of a step.

    Attributes:
        replays: earlier successes on the task that join its new group as further members.
        channel: "fresh", "replay" or "infeasible".
    """

    task_id: str
    replays: tuple[Trajectory, ...] = ()
    channel: str = "fresh"


@dataclass(slots=True)
class Stored:
    """A success that may be replayed."""

    trajectory: Trajectory
    uses: int = 0


class TaskSampler:
    """Draws tasks for a step.

    `uniform` walks through random permutations of the tasks. `variance` draws a bucket (tasks with equal tags) with
    weight max(floor, 4 P (1 - P)), where P is a moving average of the bucket's pass rate, then a task of that bucket.
    `dtac` (EvoCUA-1.5, arXiv 2607.09773) has three channels, for any method:

    - most groups are drawn as by `variance`;
    - while P is in `replay_band`, the newest success on a task is kept, and up to `replay_share` of the groups are such
      tasks: the success joins the new group, at most `replay_uses` times;
    - a fixed share of the groups are infeasible tasks, where there are any.

    The paper has single tasks where we have buckets, unless `bucket = ["task_id"]`. With `recalibrate_every`, tasks are
    left out whose own pass rate, over the episodes since the last calibration, is outside `pass_band`.

    Args:
        tasks: the pool.
        config: the `[tasks]` section.
        run_seed: the run's seed.
        infeasible: tasks that cannot be solved, whose reward is for saying so. Their share of all groups is exact in
            the long run, and off by less than one group in any step.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: TasksConfig,
        run_seed: int,
        infeasible: Sequence[Task] = (),
    ) -> None:
        if not tasks:
            raise ValueError("there is no task to train on: choose another tasks.split")
        self._config = config
        self._seed = run_seed
        self._ids = [task.task_id for task in tasks]
        self._infeasible = [task.task_id for task in infeasible]
        self._infeasible_share = config.infeasible_share if infeasible else 0.0
        self._buckets: dict[str, list[str]] = {}
        self._bucket_of: dict[str, str] = {}
        for task in tasks:
            facts = {"task_id": task.task_id, **task.tags}
            bucket = "/".join(str(facts.get(key, "")) for key in config.bucket)
            self._buckets.setdefault(bucket, []).append(task.task_id)
            self._bucket_of[task.task_id] = bucket
        self.pass_rate = dict.fromkeys(self._buckets, 0.5)
        self._stored: dict[str, Stored] = {}
        self._measured: dict[str, list[int]] = {}  # episodes and successes of each task since the last calibration
        self._steps, self._replays = 0, 0
        self._recognized: float | None = None  # of the newest step's infeasible tasks

    def draw(self, n: int, step: int) -> list[Draw]:
        """Return n draws for this step; equal arguments and observations give equal draws."""
        if self._config.sampling == "uniform":
            return [Draw(self._uniform(step * n + i)) for i in range(n)]
        special = self._replayed(n, step) + self._impossible(n, step) if self._config.sampling == "dtac" else []
        return [*self._by_variance(n - len(special), step), *special]

    def observe(self, groups: Sequence[Group], draws: Sequence[Draw] = ()) -> None:
        """Learn from finished groups and the draws they came from; invalid members do not count."""
        seen: dict[str, list[float]] = {}
        for group in groups:
            if group.task_id in self._bucket_of:
                rewards = [float(t.reward or 0.0) for t in group.valid]
                seen.setdefault(self._bucket_of[group.task_id], []).extend(rewards)
                self._count(group)
        for bucket, rewards in seen.items():
            if rewards:
                old = self.pass_rate[bucket]
                self.pass_rate[bucket] = old + self._config.ema * (float(np.mean(rewards)) - old)
        self._steps += 1
        if self._config.recalibrate_every and self._steps % self._config.recalibrate_every == 0:
            self._measured = {}
        if self._config.sampling == "dtac":
            self._store(groups, draws)
            known = [t for g in groups if g.task_id not in self._bucket_of for t in g.valid]
            self._recognized = float(np.mean([t.outcome is Outcome.SOLVED for t in known])) if known else None

    def left_out(self) -> set[str]:
        """Return the tasks whose own pass rate is outside `pass_band`, unless those are all."""
        low, high = self._config.pass_band
        out = {
            row["task_id"]
            for row in self.calibration()
            if row["episodes"] >= CALIBRATION_EPISODES and not low <= row["pass_rate"] <= high
        }
        return out if self._config.recalibrate_every and len(out) < len(self._ids) else set()

    def calibration(self) -> list[dict[str, Any]]:
        """Return for each task played since the last calibration its pass rate with Wilson's interval."""
        return [
            {
                "task_id": task_id,
                "episodes": n,
                "pass_rate": solved / n,
                "interval": wilson_interval(solved / n, n),
            }
            for task_id, (n, solved) in sorted(self._measured.items())
        ]

    def metrics(self) -> dict[str, float]:
        """Return what is logged of the tasks."""
        values: dict[str, float] = {}
        if "task_id" not in self._config.bucket:
            values |= {f"tasks/pass_rate/{bucket}": rate for bucket, rate in self.pass_rate.items()}
        if self._config.recalibrate_every:
            values["tasks/left_out"] = len(self.left_out())
        if self._config.sampling == "dtac":
            values |= {"tasks/replays": self._replays, "tasks/stored": len(self._stored)}
        if self._recognized is not None:
            values["tasks/infeasible_recognized"] = self._recognized
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON values)."""
        stored = [[to_record(kept.trajectory), kept.uses] for kept in self._stored.values()]
        return {
            "pass_rate": dict(self.pass_rate),
            "stored": stored,
            "measured": {task_id: list(counts) for task_id, counts in self._measured.items()},
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what still exists: buckets and tasks may have changed."""
        self.pass_rate.update({b: p for b, p in state["pass_rate"].items() if b in self.pass_rate})
        found = [Stored(from_record(record), uses) for record, uses in state.get("stored", [])]
        self._stored = {kept.trajectory.task_id: kept for kept in found if kept.trajectory.task_id in self._bucket_of}
        self._measured = {t: list(counts) for t, counts in state.get("measured", {}).items() if t in self._bucket_of}
        self._steps = state.get("steps", 0)

    def _uniform(self, index: int) -> str:
        epoch, place = divmod(index, len(self._ids))
        order = generator(self._seed, "tasks", "epoch", epoch).permutation(len(self._ids))
        return self._ids[int(order[place])]

    def _by_variance(self, n: int, step: int) -> list[Draw]:
        rng, out = generator(self._seed, "tasks", step), self.left_out()
        kept = {b: [t for t in ids if t not in out] for b, ids in self._buckets.items()}
        names = [bucket for bucket, ids in kept.items() if ids]
        rates = [self.pass_rate[bucket] for bucket in names]
        weights = np.array([max(self._config.floor, 4 * p * (1 - p)) for p in rates])
        chosen = rng.choice(len(names), size=n, p=weights / weights.sum())
        return [Draw(str(rng.choice(kept[names[i]]))) for i in chosen]

    def _replayed(self, n: int, step: int) -> list[Draw]:
        ready = sorted(t for t in self._stored if self._in_band(t))
        count = min(int(self._config.replay_share * n), len(ready))
        picks = generator(self._seed, "replays", step).permutation(len(ready))[:count]
        return [Draw(ready[i], (self._stored[ready[i]].trajectory,), "replay") for i in picks]

    def _impossible(self, n: int, step: int) -> list[Draw]:
        before, after = (int(s * n * self._infeasible_share + 1e-9) for s in (step, step + 1))
        picks = generator(self._seed, "infeasible", step).integers(0, max(len(self._infeasible), 1), after - before)
        return [Draw(self._infeasible[i], channel="infeasible") for i in picks]

    def _in_band(self, task_id: str) -> bool:
        low, high = self._config.replay_band
        return low <= self.pass_rate[self._bucket_of[task_id]] <= high

    def _count(self, group: Group) -> None:
        if self._config.recalibrate_every and group.valid:
            counts = self._measured.setdefault(group.task_id, [0, 0])
            counts[0] += len(group.valid)
            counts[1] += sum(t.outcome is Outcome.SOLVED for t in group.valid)

    def _store(self, groups: Sequence[Group], draws: Sequence[Draw]) -> None:
        self._replays = sum(len(draw.replays) for draw in draws)
        for draw in draws:
            if draw.replays:
                kept = self._stored[draw.task_id]
                kept.uses += 1
                if kept.uses >= self._config.replay_uses:
                    del self._stored[draw.task_id]
        for group in groups:
            solved = [t for t in group.valid if t.outcome is Outcome.SOLVED]
            if solved and group.task_id in self._bucket_of and self._in_band(group.task_id):
                self._stored[group.task_id] = Stored(solved[0])
