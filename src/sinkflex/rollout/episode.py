"""One episode: environment times policy gives a trajectory, id by id as sampled."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping
from functools import partial
from types import coroutine
from typing import Any

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason
from sinkflex.methods.hooks import Decision, Proposal, RolloutHooks, TaskFacts, TurnState
from sinkflex.policy.chat import Chat, assistant_message
from sinkflex.policy.sampler import Sampled
from sinkflex.rollout.calls import Steps, complete
from sinkflex.trajectory import Outcome, Trajectory, Turn


@coroutine
def propose() -> Generator[None, Proposal, Proposal]:
    """Wait until the sampler has a turn; the episode sends it in."""
    return (yield)


class Episode:
    """Drives one environment with sampled turns.

    Args:
        env: an environment of the contract in `envs/env.py`.
        chat: messages to ids and back, and how much of the history a prompt keeps.
        task_id, member: which task, which sibling.
        seed: seed of the environment and its user (shared by the siblings of a group).
        max_tokens: ids a conversation may hold; a turn that would not fit truncates the episode.
        policy_version: version of the sampling weights.
        hooks: the method; by default the policy acts undisturbed.
        phase: what the episode is for, told to the hooks.
    """

    def __init__(
        self,
        env: Any,
        chat: Chat,
        task_id: str,
        member: int,
        seed: int,
        max_tokens: int,
        policy_version: int,
        hooks: RolloutHooks | None = None,
        phase: str = "",
    ) -> None:
        self.env = env
        self.chat = chat
        self.task_id = task_id
        self.member = member
        self.seed = seed
        self.trajectory: Trajectory | None = None
        self._max_tokens = max_tokens
        self._version = policy_version
        self._hooks = hooks or RolloutHooks()
        self._phase = phase
        self._opening: list[Message] = []
        self._exchanges: list[tuple[Message, ...]] = []
        self._turns: list[Turn] = []
        self._conversation: list[int] = []  # what the next turn is sampled after
        self._next: tuple[list[int], bool] = ([], False)
        self._acting: Coroutine[Any, Any, Decision] | None = None
        self._info: dict[str, Any] = {}

    def begin(self) -> list[int] | None:
        """Reset the environment and return the prompt, or None if a fault ended the episode at once."""
        return complete(self.beginning())

    def advance(self, sampled: Sampled) -> tuple[list[int], bool] | None:
        """Act on a sampled turn.

        Returns:
            (ids, forks): the ids to go on with, and whether they replace the whole conversation; None at the end,
            when `trajectory` is set.
        """
        return complete(self.advancing(sampled))

    def beginning(self) -> Steps:
        """Do what `begin` does, and yield the calls of the environment instead of making them."""
        try:
            reset = partial(self.env.reset, seed=self.seed, options={"task_id": self.task_id})
            observation, self._info = yield reset
        except EnvironmentFault as fault:
            self._info = fault.info
            self._finish(fault.stop_reason, None, fault.info, str(fault))
            return None
        text = self._hooks.prompt(self._task, self._phase)
        self._opening = [*([Message("system", text)] if text else []), *observation]
        ids = self.chat.start(self._opening)
        self._conversation = list(ids)
        self._ask(ids, forks=False)
        return ids

    def advancing(self, sampled: Sampled) -> Steps:
        """Do what `advance` does, and yield the calls of the environment instead of making them."""
        assert self._acting is not None
        action = self.chat.parse(sampled.ids, sampled.finish, self._conversation)
        try:
            self._acting.send(Proposal(sampled.ids, sampled.logprobs, sampled.finish, action))
        except StopIteration as decided:
            return (yield from self._carry_out(decided.value))
        return self._conversation, True  # the method wants another proposal for the same turn

    def _ask(self, ids: list[int], forks: bool) -> tuple[list[int], bool]:
        """Let the method decide on the next turn, which is sampled after these ids."""
        self._next = (ids, forks)
        self._acting = self._hooks.act(propose, TurnState(self._task, self._phase, self._turns, self.env))
        self._acting.send(None)
        return self._next

    def _carry_out(self, decision: Decision) -> Steps:
        """Do what was decided and return what to go on with, or None at the end."""
        sampled, (prompt, forks) = decision.sampled, self._next
        turn = Turn(
            prompt,
            sampled.ids,
            sampled.logprobs,
            self._version,
            sampled.action,
            finish=sampled.finish,
            forks=forks,
            executed=decision.executed,
        )
        self._turns.append(turn)
        if decision.stop_reason is not None:
            yield from self._cut_off(decision.stop_reason, {})
            return None
        action = decision.executed or sampled.action
        try:
            observation, reward, terminated, truncated, info = yield partial(self.env.step, action)
        except EnvironmentFault as fault:
            self._finish(fault.stop_reason, None, fault.info, str(fault))
            return None
        turn.observation = tuple(observation)
        turn.reward_parts = dict(info.get("turn_reward_parts", {}))
        if terminated or truncated:
            self._finish(StopReason(info["stop_reason"]), reward, info)
            return None
        assert turn.observation, "an environment must answer a turn that does not end the episode"
        ids, forks = self._go_on(turn, action)
        self._conversation = list(ids) if forks else self._conversation + turn.action_ids + ids
        if len(self._conversation) >= self._max_tokens:
            yield from self._cut_off(StopReason.MAX_TOKENS, info)
            return None
        return self._ask(ids, forks)

    def _go_on(self, turn: Turn, action: Action) -> tuple[list[int], bool]:
        """Return the ids of the next prompt and whether they are a whole one: history was rewritten, cut or patched."""
        history = [message for exchange in self._exchanges for message in exchange]
        acted, finish = assistant_message(action), turn.finish if turn.executed is None else "stop"
        self._exchanges.append((acted, *turn.observation))
        window = self.chat.window
        if window and len(self._exchanges) > window:
            return self.chat.start([*self._opening, *(m for e in self._exchanges[-window:] for m in e)]), True
        ids, forks = self.chat.extend([*self._opening, *history, acted], turn.observation, finish)
        if turn.executed is None or forks:
            return ids, forks
        return self._conversation + self.chat.action_ids(turn.executed) + ids, True

    @property
    def _task(self) -> TaskFacts:
        return TaskFacts(self._info.get("domain", ""), self.task_id, self._info.get("tags", {}))

    def _cut_off(self, reason: StopReason, info: Mapping[str, Any]) -> Steps:
        """End the episode by a limit that the environment does not know of; it tells what had been reached."""
        truncate = getattr(self.env, "truncate", None)  # optional in the contract
        try:
            last = (yield partial(truncate, reason)) if truncate else info
        except EnvironmentFault as fault:
            self._finish(fault.stop_reason, None, fault.info, str(fault))
        else:
            self._finish(reason, 0.0, last)

    def _finish(
        self, reason: StopReason, reward: float | None, info: Mapping[str, Any], fault: str | None = None
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
            reward_parts=dict(info.get("reward_parts", {})),
            user=self._info.get("user", "none"),
            seed=self.seed,
            fault=fault,
            tags=dict(self._info.get("tags", {})),
            domain=self._info.get("domain", ""),
            record=list(info.get("record", ())),
            opening=self._opening,
        )
