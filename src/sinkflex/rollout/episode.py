"""One episode: environment times policy gives a trajectory, id by id as sampled."""

from __future__ import annotations

from typing import Any

from sinkflex.envs.env import EnvironmentFault, Message, StopReason
from sinkflex.policy.chat import Chat, assistant_message
from sinkflex.policy.sampler import Sampled
from sinkflex.trajectory import Outcome, Trajectory, Turn


class Episode:
    """Drives one environment with sampled turns.

    Args:
        env: an environment of the contract in `envs/env.py`.
        chat: messages to ids and back.
        task_id, member: which task, which sibling.
        seed: seed of the environment and its user (shared by the siblings of a group).
        max_tokens: ids an episode may hold; a turn that would not fit truncates it.
        policy_version: version of the sampling weights.
    """

    def __init__(
        self, env: Any, chat: Chat, task_id: str, member: int, seed: int, max_tokens: int, policy_version: int
    ) -> None:
        self.env = env
        self.chat = chat
        self.task_id = task_id
        self.member = member
        self.seed = seed
        self.trajectory: Trajectory | None = None
        self._max_tokens = max_tokens
        self._version = policy_version
        self._history: list[Message] = []
        self._turns: list[Turn] = []
        self._tokens = 0
        self._next: tuple[list[int], bool] = ([], False)
        self._info: dict[str, Any] = {}

    def begin(self) -> list[int] | None:
        """Reset the environment and return the prompt, or None if a fault ended the episode at once."""
        try:
            observation, self._info = self.env.reset(seed=self.seed, options={"task_id": self.task_id})
        except EnvironmentFault as fault:
            self._finish(StopReason.FAULT, None, fault=str(fault))
            return None
        self._history = list(observation)
        ids = self.chat.start(self._history)
        self._next = (ids, False)
        self._tokens = len(ids)
        return ids

    def advance(self, sampled: Sampled) -> tuple[list[int], bool] | None:
        """Act on a sampled turn.

        Returns:
            (ids, forks): the ids to go on with, and whether they replace the whole conversation; None at the end,
            when `trajectory` is set.
        """
        action = self.chat.parse(sampled.ids, sampled.finish)
        prompt, forks = self._next
        turn = Turn(prompt, sampled.ids, sampled.logprobs, self._version, action, finish=sampled.finish, forks=forks)
        self._turns.append(turn)
        self._tokens += len(sampled.ids)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except EnvironmentFault as fault:
            self._finish(StopReason.FAULT, None, fault=str(fault))
            return None
        turn.observation = tuple(observation)
        turn.reward_parts = dict(info.get("turn_reward_parts", {}))
        self._history += [assistant_message(action), *observation]
        if terminated or truncated:
            self._finish(StopReason(info["stop_reason"]), reward, info["reward_parts"])
            return None
        assert turn.observation, "an environment must answer a turn that does not end the episode"
        reply = self.chat.extend(self._history[: -len(observation)], turn.observation, sampled.finish)
        self._next = reply
        ids, forks = reply
        self._tokens = len(ids) if forks else self._tokens + len(ids)
        if self._tokens >= self._max_tokens:
            self._finish(StopReason.MAX_TOKENS, 0.0, info.get("reward_parts", {}))
            return None
        return reply

    def _finish(
        self,
        reason: StopReason,
        reward: float | None,
        reward_parts: dict[str, float] | None = None,
        fault: str | None = None,
    ) -> None:
        if reward is None:
            outcome = Outcome.INVALID
        elif not reason.terminated:
            outcome = Outcome.TRUNCATED
        else:
            outcome = Outcome.SOLVED if reward >= 1.0 else Outcome.FAILED
        self.trajectory = Trajectory(
            task_id=self.task_id,
            member=self.member,
            turns=self._turns,
            outcome=outcome,
            stop_reason=reason,
            reward=reward,
            reward_parts=dict(reward_parts or {}),
            user=self._info.get("user", "none"),
            seed=self.seed,
            fault=fault,
            tags=dict(self._info.get("tags", {})),
        )
