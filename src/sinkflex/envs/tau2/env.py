"""The tau2 benchmark as a Gymnasium environment: one thread, no model, the package's tools and data.

    step(Action) ──► calls ──► the agent's tools ──► results
                 └─► text  ──► user ──► its own tools ──► user ... until it speaks or stops

Example: telecom, dual control.

    env = Tau2Env(domain="telecom", split="train")
    observation, info = env.reset(seed=0)          # (Message("user", "My mobile data is slow ..."),)
    env.step(Action(tool_calls=(ToolCall("get_customer_by_phone", {"phone_number": "555-123-2002"}),)))
    env.step(Action(text="Please turn off Data Saver."))   # the user does it and says what it sees
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, ToolCall
from sinkflex.envs.spaces import ActionSpace, MessageSpace
from sinkflex.envs.tau2 import actions, policies, scoring, tasks
from sinkflex.envs.tau2.episode import Episode, make_user, start
from sinkflex.seeds import seed_for
from sinkflex.trajectory import Outcome
from sinkflex.users.user import User

_OPTIONS = ("domain", "task_id", "split", "user")


class Tau2Env(gymnasium.Env[tuple[Message, ...], Action]):
    """A conversation with a user (dual control) or a ticket to solve alone (solo), over one of tau2's worlds.

    Args:
        domain: telecom, retail, airline or mock.
        split: where `reset` draws a task from when it is given none; see `tasks.load`.
        solo: no user; the agent owns both sides' tools and ends the episode with `done`.
        user: "scripted", or a `User` (a prototype: every episode forks it), or a callable that returns one.
        max_turns: agent turns after which the episode is truncated.
        max_errors: failed or refused calls and unusable actions, in all, after which it is truncated.
        coerce_arguments: bring arguments into the types of their schema. Turn it off for results that are compared
            with the package's own: its tools take what they are given.
        policy_text: "full", "short" or "none"; goes into `policy` and `info["policy"]`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        domain: str = "telecom",
        split: str = "train",
        solo: bool = False,
        user: str | User | Callable[[], User] = "scripted",
        max_turns: int = 30,
        max_errors: int = 10,
        coerce_arguments: bool = True,
        policy_text: policies.PolicyText = "full",
    ) -> None:
        self.domain = tasks.checked_domain(domain)
        self.split, self.solo, self.user = split, solo, user
        self.max_turns, self.max_errors = max_turns, max_errors
        self.coerce_arguments, self.policy_text = coerce_arguments, policy_text
        self.observation_space = MessageSpace()
        self.action_space = ActionSpace(self.tools)
        self._episode: Episode | None = None

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The agent's tools as OpenAI function schemas."""
        return actions.agent_tools(self.domain, self.solo)

    @property
    def waits(self) -> bool:
        """Whether calls wait for a user outside, so that those of several environments may run in threads at once."""
        return not self.solo and getattr(self.user, "waits", False)

    @property
    def policy(self) -> str:
        """The system text."""
        return policies.policy(self.domain, self.solo, self.policy_text)

    @property
    def episode(self) -> Episode:
        """The current episode, to read.

        Raises:
            ResetNeeded: there is none.
        """
        if self._episode is None:
            raise ResetNeeded("no episode has started; call reset() first.")
        return self._episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Start an episode and return what the agent sees first: the user's opening words, or the ticket.

        Args:
            seed: fixes the task drawn and the user; None continues the current random stream.
            options: `task_id`, or `split` to draw from; `domain`, `split` and `user` hold for later episodes too.

        Raises:
            ValueError: an unknown option, domain, split, task or user.
            EnvironmentFault: the user broke.
        """
        super().reset(seed=seed)
        options = options or {}
        for name in options:
            if name not in _OPTIONS:
                raise ValueError(f"unknown reset option {name!r}; {tasks.nearest(name, _OPTIONS)}.")
        self._episode = None
        self.split, self.user = options.get("split", self.split), options.get("user", self.user)
        if options.get("domain", self.domain) != self.domain:
            self.domain = tasks.checked_domain(options["domain"])
            self.action_space = ActionSpace(self.tools)
        if "task_id" in options:
            spec = tasks.spec(self.domain, options["task_id"])
        else:
            choices = tasks.load(self.domain, self.split)
            spec = choices[self.np_random.integers(len(choices))]
        user = None if self.solo else make_user(self.user, self.domain)
        draw = seed if seed is not None else int(self.np_random.integers(2**62))
        info = {
            "stop_reason": None,
            "domain": self.domain,
            "task_id": spec.task_id,
            "tags": dict(spec.tags),
            "user": "none" if user is None else user.kind,
            "policy": self.policy,
            "tools": list(self.tools),
            "greeting": "" if self.solo else policies.GREETING,
        }
        try:
            self._episode, observation = start(spec, user, seed_for(draw, "user", spec.task_id))
        except EnvironmentFault as fault:
            fault.info = info
            raise
        return observation, info

    def step(self, action: Action | Mapping[str, Any]) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Play one agent turn.

        Calls run in order; text beside calls is a private note. Text alone goes to the user, without its thinking.
        An action that could not be parsed or is empty comes back as an error, costs the turn and reaches nobody.

        Returns:
            observation, reward (0.0 until the task's own end), terminated (user or agent ended it), truncated (a limit
            did), info. At the end info holds `reward_parts`, `outcome` and `record`, also when truncated.

        Raises:
            ResetNeeded: the episode has ended or none has started.
            EnvironmentFault: a tool or the user broke; the episode is invalid.
        """
        episode = self.episode
        if episode.stop_reason is not None:
            raise ResetNeeded(f"the episode has ended ({episode.stop_reason}); call reset() before step().")
        action = actions.as_action(action)
        episode.counts["turns"] += 1
        try:
            observation = self._act(episode, action)
            if episode.stop_reason is None and episode.counts["errors"] >= self.max_errors:
                episode.stop_reason = StopReason.TOO_MANY_ERRORS
            if episode.stop_reason is None and episode.counts["turns"] >= self.max_turns:
                episode.stop_reason = StopReason.MAX_TURNS
            return observation, *self._verdict(episode)
        except EnvironmentFault as fault:
            episode.stop_reason = StopReason.FAULT
            fault.info = {"record": tuple(episode.record)}
            raise

    def truncate(self, reason: StopReason) -> dict[str, Any]:
        """End the episode by a limit that is not the environment's, and return the info of its end.

        Raises:
            ResetNeeded: there is no episode.
            EnvironmentFault: an assertion of the task broke.
        """
        self.episode.stop_reason = reason
        return self._verdict(self.episode)[3]

    def score(self) -> scoring.Score:
        """Score the current state as if the task ended here. Changes nothing.

        Raises:
            ResetNeeded: there is no episode.
            EnvironmentFault: an assertion of the task broke.
        """
        episode = self.episode
        try:
            return scoring.score(self.domain, episode.task, episode.world, episode.calls, episode.texts)
        except Exception as error:
            raise EnvironmentFault(f"task {episode.spec.task_id!r} cannot be scored: {error}") from error

    def fork(self) -> Tau2Env:
        """Return an independent environment in the same state: world, user, random streams and all."""
        clone = copy.copy(self)
        clone._episode = self._episode.fork() if self._episode else None
        clone._np_random = copy.deepcopy(self._np_random)
        clone.action_space = copy.deepcopy(self.action_space)
        clone.observation_space = copy.deepcopy(self.observation_space)
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Tau2Env:
        return self.fork()

    def close(self) -> None:
        """Free the episode. The environment can be reset again."""
        self._episode = None

    def _act(self, episode: Episode, action: Action) -> tuple[Message, ...]:
        if action.error is not None:
            return _reject(episode, action.error)
        if action.tool_calls:
            return tuple(self._call(episode, position, call) for position, call in enumerate(action.tool_calls))
        text = actions.visible_text(action.text or "")
        if not text:
            return _reject(episode, "an empty message; write to the user or call a tool")
        user = episode.user
        if user is None and (self.domain not in policies.TEXT_IN_SOLO or episode.texts):
            return _reject(episode, f"nobody reads a message here; call a tool, or {actions.DONE}")
        episode.record.append(("assistant", Message("assistant", text)))
        if user is None:
            return (Message("user", f"(The customer has read this. Go on with calls, or call {actions.DONE}.)"),)
        return episode.hear(lambda: user.reply(text))

    def _call(self, episode: Episode, position: int, call: ToolCall) -> Message:
        call = dataclasses.replace(call, id=call.id or f"call_{episode.counts['turns']}_{position}")
        if self.coerce_arguments:
            call = actions.coerce(self.domain, call)
        refused = "the episode has ended" if episode.stop_reason else actions.refusal(call, position)
        if refused:
            episode.counts["errors"] += 1
            return Message("tool", f"Error: {refused}", tool_call_id=call.id, error=True)
        if self.solo and call.name == actions.DONE:
            episode.stop_reason = StopReason.AGENT_STOP
            return Message("tool", "", tool_call_id=call.id)
        answer = episode.call("assistant", call)
        episode.counts["errors"] += answer.error
        if call.name in actions.agent_tool_names(self.domain, self.solo):
            return answer
        wrong_owner = call.name in actions.user_tool_names(self.domain)
        episode.counts["wrong_owner_calls" if wrong_owner else "unknown_tool_calls"] += 1
        hint = actions.not_found_hint(self.domain, call.name, self.solo)
        return dataclasses.replace(answer, content=f"{answer.content} {hint}")

    def _verdict(self, episode: Episode) -> tuple[float, bool, bool, dict[str, Any]]:
        reason = episode.stop_reason
        info: dict[str, Any] = {"stop_reason": reason, **episode.counts}
        if reason is None:
            return 0.0, False, False, info
        result = self.score()
        reward = result.reward if reason.terminated else 0.0
        info |= {"reward_parts": result.parts, "record": tuple(episode.record)}
        if reason.terminated:
            info["outcome"] = Outcome.SOLVED if reward == 1.0 else Outcome.FAILED
        else:
            info["outcome"] = Outcome.TRUNCATED
        return reward, reason.terminated, not reason.terminated, info


def _reject(episode: Episode, reason: str) -> tuple[Message, ...]:
    episode.counts["errors"] += 1
    episode.counts["parse_errors"] += 1
    return (Message("tool", f"Error: {reason}", error=True),)
