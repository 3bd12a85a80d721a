"""Many episodes at once: whichever environment is ready asks the sampler for a turn, in one loop without threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkflex.methods.hooks import RolloutHooks
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampled, Sampler, Stream
from sinkflex.rollout.episode import Episode
from sinkflex.seeds import generator, seed_for
from sinkflex.trajectory import Group

COUNTS = ("prefilled", "copied", "sampled", "rejected")


@dataclass(slots=True)
class Phase:
    """Names a rollout phase; all its random draws are keyed by it.

    Attributes:
        purpose: "train", "validation", "evaluation" or "rollout"; a task set may follow after a slash.
        run_seed: the run's seed.
        step: the loop's step.
        policy_version: version of the sampling weights.
        temperature: of sampling; 0 is greedy.
        trials: members are trials of a score, each in an environment with a seed of its own; else they are siblings,
            which all meet the same environment.
    """

    purpose: str
    run_seed: int
    step: int
    policy_version: int
    temperature: float
    trials: bool = False


def rollout(
    task_ids: Sequence[str],
    group_size: int,
    make_env: Callable[[], Any],
    chat: Chat,
    sampler: Sampler,
    phase: Phase,
    on_episode: Callable[[Episode], None] | None = None,
    hooks: RolloutHooks | None = None,
    retries: int = 0,
) -> tuple[list[Group], dict[str, float]]:
    """Roll out `group_size` episodes of every task and return the groups in the order of `task_ids`.

    Args:
        task_ids: tasks, one group each (a task may occur twice).
        group_size: siblings.
        make_env: makes an environment; at most as many as the sampler has slots are live.
        chat: messages to ids.
        sampler: samples turns; its cached prefixes are dropped first.
        phase: keys every random draw.
        on_episode: called with each finished episode.
        hooks: the method; without one the policy acts undisturbed.
        retries: how often an episode that a fault ended starts again, after those that wait. It keeps its seeds and
            random numbers: other draws would let the fault choose what is sampled.

    Returns:
        The groups, and facts: seconds in "environment" and "sampler", the sampler's tokens (COUNTS), "retried" ones.
    """
    sampler.clear()
    sampler.temperature = phase.temperature
    facts = {"environment": 0.0, "sampler": 0.0}
    counted = {name: getattr(sampler, name) for name in COUNTS}
    kind = phase.purpose.partition("/")[0]
    seeds = [_seeds(phase, index, task_id, len(task_ids), group_size) for index, task_id in enumerate(task_ids)]

    def new(number: int) -> Episode:
        index, member = divmod(number, group_size)
        identity = (task_ids[index], member, seeds[index][member])
        return Episode(None, chat, *identity, sampler.max_tokens, phase.policy_version, hooks, kind)

    queue = _Queue(new, len(task_ids) * group_size, make_env, retries, on_episode)
    running: dict[Stream, int] = {}
    while queue.waiting or running:
        with _timed(facts, "environment"):
            while queue.waiting and sampler.free:
                number, episode = queue.next()
                prompt = episode.begin()
                if prompt is None:
                    queue.retire(number)
                else:
                    running[sampler.open(prompt, _draws(phase, number // group_size, episode))] = number
        with _timed(facts, "sampler"):
            finished = sampler.tick()
        with _timed(facts, "environment"):
            for sampled in finished:
                if _advance(queue.episodes[running[sampled.stream]], sampled, sampler):
                    queue.retire(running.pop(sampled.stream))
    queue.close()
    facts |= {name: getattr(sampler, name) - before for name, before in counted.items()}
    return _groups(task_ids, group_size, queue.episodes), {**facts, "retried": queue.retried}


class _Queue:
    """The episodes of a phase: those that wait, those that faults ended and that start again, and used environments."""

    def __init__(
        self,
        new: Callable[[int], Episode],
        count: int,
        make_env: Callable[[], Any],
        retries: int,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        self.episodes = [new(number) for number in range(count)]
        self.waiting = deque(range(count))
        self.retried = 0
        self._new, self._make_env, self._on_episode = new, make_env, on_episode
        self._retries = [retries] * count
        self._envs: list[Any] = []

    def next(self) -> tuple[int, Episode]:
        """Return the number of an episode that waits, and the episode with an environment."""
        number = self.waiting.popleft()
        episode = self.episodes[number]
        episode.env = self._envs.pop() if self._envs else self._make_env()
        return number, episode

    def retire(self, number: int) -> None:
        """Take the environment of an episode that has ended; if a fault ended it, let it wait for another attempt."""
        episode = self.episodes[number]
        assert episode.trajectory is not None
        self._envs.append(episode.env)
        episode.env = None
        if not episode.trajectory.valid and self._retries[number]:
            self._retries[number] -= 1
            self.retried += 1
            self.episodes[number] = self._new(number)
            self.waiting.append(number)
        elif self._on_episode is not None:
            self._on_episode(episode)

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()


def _advance(episode: Episode, sampled: Sampled, sampler: Sampler) -> bool:
    """Act on a sampled turn and ask for the next one; True if the episode has ended."""
    reply = episode.advance(sampled)
    if reply is None:
        sampler.close(sampled.stream)
        return True
    ids, forks = reply
    (sampler.restart if forks else sampler.extend)(sampled.stream, ids)
    return False


def _seeds(phase: Phase, index: int, task_id: str, tasks: int, members: int) -> list[int]:
    """Seeds of the environment and its user for the members of a group: trial k stands for task k * tasks + index."""
    places = range(index, members * tasks, tasks) if phase.trials else [index] * members
    return [seed_for(phase.run_seed, "environment", phase.purpose, phase.step, place, task_id) for place in places]


def _draws(phase: Phase, index: int, episode: Episode) -> np.random.Generator:
    """The random numbers an episode is sampled with, keyed by what they are for."""
    return generator(phase.run_seed, "sampler", phase.purpose, phase.step, index, episode.task_id, episode.member)


def _groups(task_ids: Sequence[str], group_size: int, episodes: Sequence[Episode]) -> list[Group]:
    records = [episode.trajectory for episode in episodes if episode.trajectory is not None]
    assert len(records) == len(episodes), "an episode has not ended"
    return [Group(task_id, records[i * group_size : (i + 1) * group_size]) for i, task_id in enumerate(task_ids)]


@contextmanager
def _timed(spent: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - started
