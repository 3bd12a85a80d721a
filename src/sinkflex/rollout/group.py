"""Many episodes at once, in one loop: whichever environment is ready asks the sampler for a turn."""

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
from sinkflex.rollout.calls import Calls, Steps
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
        temperature, top_p: of sampling; 0 is greedy. No row is made of episodes whose top_p is below 1.
        trials: members are trials of a score, each in an environment with a seed of its own; else they are siblings,
            which all meet the same environment.
    """

    purpose: str
    run_seed: int
    step: int
    policy_version: int
    temperature: float
    trials: bool = False
    top_p: float = 1.0

    @property
    def kind(self) -> str:
        """The purpose without its task set."""
        return self.purpose.partition("/")[0]


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
    share: Sequence[int] | None = None,
    in_order: bool = True,
) -> tuple[list[Group], dict[str, float]]:
    """Roll out `group_size` episodes of every task and return the groups in the order of `task_ids`.

    Args:
        task_ids, group_size: tasks, one group each (a task may occur twice); siblings.
        make_env: makes an environment; at most as many as the sampler has slots are live.
        chat: messages to ids.
        sampler: samples turns; its cached prefixes are dropped first.
        phase: keys every random draw.
        on_episode: called with each finished episode.
        hooks: the method; without one the policy acts undisturbed.
        retries: how often an episode that a fault ended starts again, after those that wait. It keeps its seeds and
            random numbers: other draws would let the fault choose what is sampled.
        share: places in `task_ids` of the groups to play; all if left out. The others change nothing in these.
        in_order: who waits for a server goes on in rounds, so that equal answers give equal bits.

    Returns:
        The groups, and facts: seconds in "environment" and "sampler", the sampler's tokens (COUNTS), "retried" ones.
    """
    sampler.clear()
    sampler.temperature, sampler.top_p = phase.temperature, phase.top_p
    facts = {"environment": 0.0, "sampler": 0.0}
    counted = {name: getattr(sampler, name) for name in COUNTS}
    seeds = [_seeds(phase, index, task_id, len(task_ids), group_size) for index, task_id in enumerate(task_ids)]

    def new(number: int) -> Episode:
        i, member = divmod(number, group_size)
        who = (task_ids[i], member, seeds[i][member])
        return Episode(None, chat, *who, sampler.max_tokens, phase.policy_version, hooks, phase.kind)

    queue = _Queue(new, range(len(task_ids)) if share is None else share, group_size, make_env, retries, on_episode)
    talks = _Talks(queue, sampler, lambda number, episode: _draws(phase, number // group_size, episode), in_order)
    while queue.waiting or talks:
        with _timed(facts, "environment"):
            talks.begin()
        with _timed(facts, "sampler"):
            finished = sampler.tick()
        with _timed(facts, "environment"):
            talks.act(finished)
    queue.close()
    facts |= {name: getattr(sampler, name) - before for name, before in counted.items()}
    return queue.groups(), {**facts, "retried": queue.retried}


def gather(
    played: Sequence[tuple[list[Group], dict[str, float]]], shares: Sequence[Sequence[int]]
) -> tuple[list[Group], dict[str, float]]:
    """Put together what several processes played at the same time: groups by their place, means of seconds, sums."""
    places = [index for share in shares for index in share]
    groups = [group for found, _ in played for group in found]
    ordered = [group for _, group in sorted(zip(places, groups, strict=True), key=lambda pair: pair[0])]
    facts = {name: sum(found[name] for _, found in played) for name in played[0][1]}
    return ordered, {**facts, **{name: facts[name] / len(played) for name in ("environment", "sampler")}}


class _Queue:
    """The episodes of a phase: those that wait, those that faults ended and that start again, and used environments."""

    def __init__(
        self,
        new: Callable[[int], Episode],
        share: Sequence[int],
        group_size: int,
        make_env: Callable[[], Any],
        retries: int,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        numbers = [index * group_size + member for index in share for member in range(group_size)]
        self.episodes = {number: new(number) for number in numbers}
        self.waiting = deque(numbers)
        self.retried = 0
        self._new, self._make_env, self._on_episode = new, make_env, on_episode
        self._retries = dict.fromkeys(numbers, retries)
        self._envs: list[Any] = []
        self._group_size = group_size

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

    def groups(self) -> list[Group]:
        """Return the groups, in the order of their numbers' share."""
        records = [episode.trajectory for episode in self.episodes.values() if episode.trajectory is not None]
        assert len(records) == len(self.episodes), "an episode has not ended"
        parts = (records[i : i + self._group_size] for i in range(0, len(records), self._group_size))
        return [Group(part[0].task_id, part) for part in parts]

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()


class _Talks:
    """The episodes under way: the sampler's conversation of each, and the calls they wait for."""

    def __init__(
        self,
        queue: _Queue,
        sampler: Sampler,
        draws: Callable[[int, Episode], np.random.Generator],
        in_order: bool,
    ) -> None:
        self._calls = Calls()
        self._queue, self._sampler, self._draws = queue, sampler, draws
        # In order, those who wait for something outside go on together, when nobody else can.
        self._late, self._awaited = ("none", "all") if in_order else ("ended", "first")
        self._beginning: set[int] = set()
        self._streams: dict[int, Stream] = {}
        self._numbers: dict[Stream, int] = {}

    def __bool__(self) -> bool:
        return bool(self._streams or self._calls)

    def begin(self) -> None:
        """Take up what environments said, begin as many episodes as there is room for, and wait if nobody can go on."""
        self._settle(self._late)
        while self._queue.waiting and self._sampler.free > len(self._beginning):
            number, episode = self._queue.next()
            self._beginning.add(number)
            self._start(number, episode.beginning())
        busy = any(stream.sampling for stream in self._numbers)
        self._settle(self._late if busy else self._awaited)

    def act(self, finished: Sequence[Sampled]) -> None:
        """Let episodes act on their sampled turns."""
        for sampled in finished:
            number = self._numbers[sampled.stream]
            self._start(number, self._queue.episodes[number].advancing(sampled))

    def _start(self, number: int, steps: Steps) -> None:
        self._calls.start(number, steps, getattr(self._queue.episodes[number].env, "waits", False))

    def _settle(self, threads: str) -> None:
        """Take up what environments said: the next turn is sampled, or the episode has ended."""
        for number, reply in self._calls.finished(threads):
            self._beginning.discard(number)
            stream = self._streams.get(number)
            if reply is None:
                if stream is not None:
                    self._sampler.close(stream)
                    del self._streams[number], self._numbers[stream]
                self._queue.retire(number)
            elif stream is None:
                stream = self._sampler.open(reply, self._draws(number, self._queue.episodes[number]))
                self._streams[number], self._numbers[stream] = stream, number
            else:
                ids, forks = reply
                (self._sampler.restart if forks else self._sampler.extend)(stream, ids)


def _seeds(phase: Phase, index: int, task_id: str, tasks: int, members: int) -> list[int]:
    """Seeds of the environment and its user for the members of a group: trial k stands for task k * tasks + index.

    Trials have the same users at every step, so that validations differ by the weights alone.
    """
    places = range(index, members * tasks, tasks) if phase.trials else [index] * members
    step = 0 if phase.trials else phase.step
    return [seed_for(phase.run_seed, "environment", phase.purpose, step, place, task_id) for place in places]


def _draws(phase: Phase, index: int, episode: Episode) -> np.random.Generator:
    """The random numbers an episode is sampled with, keyed by what they are for."""
    return generator(phase.run_seed, "sampler", phase.purpose, phase.step, index, episode.task_id, episode.member)


@contextmanager
def _timed(spent: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - started
