"""Episodes of rule-based agents: demonstrations for the warm start, floors for every score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sinkflex.envs.env import Action, Message
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampled, Stream, require_room
from sinkflex.rollout.episode import Episode
from sinkflex.trajectory import Trajectory


class Agent(Protocol):
    """An agent made of rules: sees the conversation, returns an action."""

    def reset(self, seed: int) -> None:
        """Start an episode."""
        ...

    def act(self, messages: list[Message]) -> Action:
        """Choose the next action."""
        ...


@dataclass(slots=True)
class Dialogue:
    """What happened in one scripted episode."""

    task_id: str
    seed: int
    opening: tuple[Message, ...]
    exchanges: list[tuple[Action, tuple[Message, ...]]]
    reward: float
    info: dict[str, Any]


def play(env: Any, agent: Agent, task_id: str, seed: int) -> Dialogue:
    """Play one episode in the environment."""
    observation, info = env.reset(seed=seed, options={"task_id": task_id})
    agent.reset(seed)
    dialogue = Dialogue(task_id, seed, tuple(observation), [], 0.0, info)
    messages = list(observation)
    while True:
        action = agent.act(messages)
        observation, reward, terminated, truncated, last = env.step(action)
        dialogue.exchanges.append((action, tuple(observation)))
        messages += [Message("assistant", action.text or "", tool_calls=action.tool_calls), *observation]
        if terminated or truncated:
            dialogue.reward = reward
            dialogue.info = {**info, **last}
            return dialogue


class _Replay:
    """An environment that plays a finished dialogue back."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._next = 0

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        return self._dialogue.opening, self._dialogue.info

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        expected, observation = self._dialogue.exchanges[self._next]
        assert _content(action) == _content(expected), f"encoding changed an action: {expected} became {action}"
        self._next += 1
        ended = self._next == len(self._dialogue.exchanges)
        return observation, self._dialogue.reward if ended else 0.0, ended, False, self._dialogue.info


def _content(action: Action) -> tuple[Any, ...]:
    """What an action does, without the ids of its calls."""
    return action.text, [(call.name, dict(call.arguments)) for call in action.tool_calls], action.error


def encode(dialogue: Dialogue, chat: Chat, max_tokens: int) -> Trajectory:
    """Return the dialogue as the trajectory a policy would have left had it sampled these actions (log-probs are 0).

    Raises:
        ValueError: the prompt alone is longer than `max_tokens`.
    """
    episode = Episode(_Replay(dialogue), chat, dialogue.task_id, 0, dialogue.seed, max_tokens, policy_version=-1)
    require_room(len(episode.begin() or ()), max_tokens)
    stream = Stream(slot=-1, draws=np.random.default_rng(0), pending=[])  # nothing is drawn
    for action, _ in dialogue.exchanges:
        ids = chat.action_ids(action)
        if episode.advance(Sampled(stream, ids, [0.0] * len(ids), "stop")) is None:
            break
    assert episode.trajectory is not None
    return episode.trajectory
