"""Many episodes at once: whichever environment is ready asks the sampler for a turn, in one loop without threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler, Stream
from sinkflex.rollout.episode import Episode
from sinkflex.seeds import generator, seed_for
from sinkflex.trajectory import Group


@dataclass(slots=True)
class Phase:
    """Names a rollout phase; all its random draws are keyed by it.

    Attributes:
        purpose: "train", "validation" or "evaluation".
        run_seed: the run's seed.
        step: the loop's step.
        policy_version: version of the sampling weights.
        temperature: of sampling; 0 is greedy.
    """

    purpose: str
    run_seed: int
    step: int
    policy_version: int
    temperature: float


def rollout(
    task_ids: Sequence[str],
    group_size: int,
    make_env: Callable[[], Any],
    chat: Chat,
    sampler: Sampler,
    phase: Phase,
    on_episode: Callable[[Episode], None] | None = None,
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

    Returns:
        The groups, and timings in seconds: {"environment": s, "sampler": s}.
    """
    sampler.clear()
    sampler.temperature = phase.temperature
    spent = {"environment": 0.0, "sampler": 0.0}
    episodes: list[Episode] = []
    for index, task_id in enumerate(task_ids):
        seed = seed_for(phase.run_seed, "environment", phase.purpose, phase.step, index, task_id)
        episodes += [
            Episode(None, chat, task_id, member, seed, sampler.max_tokens, phase.policy_version)
            for member in range(group_size)
        ]
    waiting = deque(enumerate(episodes))
    running: dict[Stream, Episode] = {}
    idle_envs: list[Any] = []
    while waiting or running:
        started = time.perf_counter()
        while waiting and sampler.free:
            number, episode = waiting.popleft()
            episode.env = idle_envs.pop() if idle_envs else make_env()
            prompt = episode.begin()
            if prompt is None:
                _retire(episode, idle_envs, on_episode)
                continue
            key = (phase.purpose, phase.step, number // group_size, episode.task_id, episode.member)
            uniforms = generator(phase.run_seed, "sampler", *key).random(sampler.max_tokens)
            running[sampler.open(prompt, uniforms)] = episode
        middle = time.perf_counter()
        finished = sampler.tick()
        spent["environment"] += middle - started
        started = time.perf_counter()
        spent["sampler"] += started - middle
        for sampled in finished:
            episode = running[sampled.stream]
            reply = episode.advance(sampled)
            if reply is None:
                sampler.close(sampled.stream)
                del running[sampled.stream]
                _retire(episode, idle_envs, on_episode)
            elif reply[1]:
                sampler.restart(sampled.stream, reply[0])
            else:
                sampler.extend(sampled.stream, reply[0])
        spent["environment"] += time.perf_counter() - started
    for env in idle_envs:
        env.close()
    records = [episode.trajectory for episode in episodes]
    assert all(record is not None for record in records)
    groups = [
        Group(task_id, [r for r in records[i * group_size : (i + 1) * group_size] if r is not None])
        for i, task_id in enumerate(task_ids)
    ]
    return groups, spent


def _retire(episode: Episode, idle_envs: list[Any], on_episode: Callable[[Episode], None] | None) -> None:
    idle_envs.append(episode.env)
    episode.env = None
    if on_episode is not None:
        on_episode(episode)
