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
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from tau2.data_model.message import ToolCall as Tau2ToolCall
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, ToolCall
from sinkflex.envs.spaces import ActionSpace, MessageSpace
from sinkflex.envs.tau2 import actions, policies, scoring, tasks
from sinkflex.envs.tau2.database import copy_value, fork_world, new_world
from sinkflex.seeds import seed_for
from sinkflex.trajectory import Outcome
from sinkflex.users.user import User, UserAction, UserStop

MAX_USER_ROUNDS = 50

_SCRIPTED = {"telecom": "sinkflex.users.telecom:TelecomUser", "mock": "sinkflex.users.mock:MockUser"}
_STOPS = {
    UserStop.STOP: StopReason.USER_STOP,
    UserStop.TRANSFER: StopReason.TRANSFER,
    UserStop.OUT_OF_SCOPE: StopReason.OUT_OF_SCOPE,
}


@dataclass(slots=True)
class Episode:
    """Everything that changes during an episode.

    Attributes:
        record: (actor, message) in order, as the package's evaluator would see it: what agent ("assistant") and user
            ("user") said and called, and the tools' answers under the actor that asked.
        counts: turns, errors (failed or refused calls, unusable actions) and three kinds of them.
    """

    spec: tasks.TaskSpec
    task: Task
    world: Environment
    user: User | None
    seed: int
    record: list[tuple[str, Message]] = field(default_factory=list)
    stop_reason: StopReason | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("turns", "errors", "parse_errors", "unknown_tool_calls", "user_tool_calls"), 0
        )
    )

    def fork(self) -> Episode:
        """Return an independent copy."""
        return dataclasses.replace(
            self,
            world=fork_world(self.world),
            user=self.user.fork() if self.user else None,
            record=list(self.record),
            counts=dict(self.counts),
        )


class Tau2Env(gymnasium.Env[tuple[Message, ...], Action]):
    """A conversation with a user (dual control) or a ticket to solve alone (solo), over one of tau2's worlds.

    Args:
        domain: telecom, retail, airline or mock.
        split: where `reset` draws a task from when it is given none; see `tasks.load`.
        solo: no user; the agent owns both sides' tools and ends the episode with `done`.
        user: "scripted", or a `User` (a prototype: every episode forks it), or a callable that returns one.
        max_turns: agent turns after which the episode is truncated.
        max_errors: failed or refused calls and unusable actions, in all, after which it is truncated.
        coerce_arguments: bring arguments into the types of their schema. Off for results that are compared with the
            package's own: its tools take what they are given.
        policy_text: "full", "short" or "none"; goes into `policy` and `info["policy"]`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        domain: str = "telecom",
        split: str = "train",
        solo: bool = False,
        user: str | User | Callable[[], User] = "scripted",
        max_turns: int = 60,
        max_errors: int = 10,
        coerce_arguments: bool = True,
        policy_text: policies.PolicyText = "full",
    ) -> None:
        self.split, self.solo, self.user = split, solo, user
        self.max_turns, self.max_errors = max_turns, max_errors
        self.coerce_arguments, self.policy_text = coerce_arguments, policy_text
        self.observation_space = MessageSpace()
        self._episode: Episode | None = None
        self._set_domain(tasks.checked_domain(domain))

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The agent's tools as OpenAI function schemas."""
        return actions.agent_tools(self.domain, self.solo)

    @property
    def policy(self) -> str:
        """The system text of this domain."""
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
            options: `task_id`, or `split` to draw from; `domain` and `user` replace the constructor's from here on.

        Raises:
            ValueError: an unknown option, domain, split or task.
            EnvironmentFault: the user broke.
        """
        super().reset(seed=seed)
        options = options or {}
        for name in options:
            if name not in ("domain", "task_id", "split", "user"):
                raise ValueError(
                    f"unknown reset option {name!r}; {tasks.nearest(name, ('domain', 'task_id', 'split', 'user'))}."
                )
        self._episode = None
        self._set_domain(tasks.checked_domain(options.get("domain", self.domain)))
        self.split, self.user = options.get("split", self.split), options.get("user", self.user)
        if "task_id" in options:
            spec = tasks.spec(self.domain, options["task_id"])
        else:
            choices = tasks.load(self.domain, self.split)
            spec = choices[self.np_random.integers(len(choices))]
        user_seed = seed_for(seed if seed is not None else int(self.np_random.integers(2**62)), "user", spec.task_id)
        observation = self._start(spec, user_seed)
        return observation, {
            "stop_reason": None,
            "domain": self.domain,
            "task_id": spec.task_id,
            "tags": dict(spec.tags),
            "user": self.episode.user.kind if self.episode.user else "none",
            "policy": self.policy,
            "tools": list(self.tools),
            "greeting": "" if self.solo else policies.GREETING,
        }

    def step(self, action: Action | Mapping[str, Any]) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Play one agent turn.

        Calls run in order, and text beside calls is a private note. Text alone goes to the user without its thinking.
        An action that could not be parsed or is empty comes back as an error, costs the turn and reaches nobody.

        Returns:
            observation, reward (0.0 until the task's own end), terminated (user or agent ended it), truncated (a limit
            did), info. At the end info holds `reward_parts` and `outcome`, also when truncated.

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
        except EnvironmentFault:
            episode.stop_reason = StopReason.FAULT
            raise

    def score(self) -> scoring.Score:
        """Score the current state as if the task ended here. Changes nothing.

        Raises:
            ResetNeeded: there is no episode.
            EnvironmentFault: an assertion of the task broke.
        """
        episode = self.episode
        calls = [call for _, message in episode.record for call in message.tool_calls]
        texts = [m.content for actor, m in episode.record if actor == "assistant" and m.role == "assistant"]
        try:
            return scoring.score(self.domain, episode.task, episode.world, calls, texts)
        except Exception as error:
            raise EnvironmentFault(f"scoring task {episode.spec.task_id!r} failed: {error}") from error

    def fork(self) -> Tau2Env:
        """Return an independent environment in the same state: world, user, random stream and all."""
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

    def _set_domain(self, domain: str) -> None:
        if domain != getattr(self, "domain", None):
            self.domain = domain
            self.action_space = ActionSpace(self.tools)

    def _start(self, spec: tasks.TaskSpec, user_seed: int) -> tuple[Message, ...]:
        task = tasks.read(spec.domain, spec.task_id)
        opening = policies.ticket(self.domain, task) if self.solo else None
        user = None if self.solo else _make_user(self.user, self.domain)
        world = new_world(self.domain, self.solo)
        scoring.initialize(world, task)
        episode = Episode(spec, task, world, user, user_seed)
        episode.record.extend(_history(task))
        seen = tuple(message for actor, message in episode.record if message.role != "tool" or actor == "assistant")
        if user is None:
            self._episode = episode
            return (*seen, Message("user", opening))
        if not episode.record:
            episode.record.append(("assistant", Message("assistant", policies.GREETING)))
        observation = self._hear(episode, _ask(lambda: user.reset(task, user_seed)))
        if episode.stop_reason is not None:
            raise EnvironmentFault(f"the {user.kind} user ended the conversation before the agent's first turn")
        self._episode = episode
        return (*seen, *observation)

    def _act(self, episode: Episode, action: Action) -> tuple[Message, ...]:
        if action.error is not None:
            return self._reject(episode, action.error)
        if action.tool_calls:
            return self._run_calls(episode, action.tool_calls)
        text = actions.visible_text(action.text or "")
        if not text:
            return self._reject(episode, "an empty message; write to the user or call a tool")
        said_before = any(actor == "assistant" and m.role == "assistant" and m.content for actor, m in episode.record)
        if episode.user is None and (self.domain not in policies.TEXT_IN_SOLO or said_before):
            return self._reject(episode, "nobody reads a message here; call a tool, or done")
        episode.record.append(("assistant", Message("assistant", text)))
        if episode.user is None:
            return (Message("user", "(The customer has read this. Go on with tool calls, or call done.)"),)
        return self._hear(episode, _ask(lambda: episode.user.reply(text)))

    def _reject(self, episode: Episode, reason: str) -> tuple[Message, ...]:
        episode.counts["errors"] += 1
        episode.counts["parse_errors"] += 1
        return (Message("tool", f"Error: {reason}", error=True),)

    def _run_calls(self, episode: Episode, calls: tuple[ToolCall, ...]) -> tuple[Message, ...]:
        observation = []
        for position, call in enumerate(calls):
            call = dataclasses.replace(call, id=call.id or f"call_{episode.counts['turns']}_{position}")
            refused = actions.refusal(call, position)
            if episode.stop_reason is not None:
                refused = f"the episode ended at {actions.DONE}"
            if refused:
                episode.counts["errors"] += 1
                observation.append(Message("tool", f"Error: {refused}", tool_call_id=call.id, error=True))
            elif self.solo and call.name == actions.DONE:
                episode.stop_reason = StopReason.AGENT_STOP
                observation.append(Message("tool", "", tool_call_id=call.id))
            else:
                observation.append(self._run_call(episode, call))
        return tuple(observation)

    def _run_call(self, episode: Episode, call: ToolCall) -> Message:
        known = call.name in actions.agent_tool_names(self.domain, self.solo)
        if self.coerce_arguments and known:
            call = dataclasses.replace(call, arguments=actions.coerce(self.domain, call))
        result = _respond(episode, "assistant", call)
        episode.counts["errors"] += result.error
        if known:
            return result
        theirs = call.name in actions.user_tool_names(self.domain)
        episode.counts["user_tool_calls" if theirs else "unknown_tool_calls"] += 1
        hint = actions.not_found_hint(self.domain, call.name, self.solo)
        return dataclasses.replace(result, content=f"{result.content} {hint}")

    def _hear(self, episode: Episode, reply: UserAction) -> tuple[Message, ...]:
        """Let the user use its own tools until it speaks or stops; return what the agent hears."""
        for _ in range(MAX_USER_ROUNDS):
            results = tuple(
                _respond(episode, "user", dataclasses.replace(call, id=call.id or f"user_call_{len(episode.record)}"))
                for call in reply.tool_calls
            )
            if reply.stop is not None:
                episode.stop_reason = _STOPS[reply.stop]
            if reply.stop is not None or not results:
                break
            reply = _ask(lambda: episode.user.observe(results))  # noqa: B023
        else:
            raise EnvironmentFault(f"the {episode.user.kind} user used tools {MAX_USER_ROUNDS} times without a word")
        if not reply.text:
            if reply.stop is None:
                raise EnvironmentFault(f"the {episode.user.kind} user neither spoke nor acted nor stopped")
            return ()
        message = Message("user", reply.text)
        episode.record.append(("user", message))
        return (message,)

    def _verdict(self, episode: Episode) -> tuple[float, bool, bool, dict[str, Any]]:
        reason = episode.stop_reason
        info: dict[str, Any] = {"stop_reason": reason, **episode.counts}
        if reason is None:
            return 0.0, False, False, info
        result = self.score()
        reward = result.reward if reason.terminated else 0.0
        info["reward_parts"] = dict(result.parts)
        info["outcome"] = (
            (Outcome.SOLVED if reward == 1.0 else Outcome.FAILED) if reason.terminated else Outcome.TRUNCATED
        )
        return reward, reason.terminated, not reason.terminated, info


def _make_user(user: str | User | Callable[[], User], domain: str) -> User:
    if isinstance(user, str):
        if user != "scripted" or domain not in _SCRIPTED:
            raise ValueError(
                f"no user {user!r} for {domain}: 'scripted' exists for {', '.join(_SCRIPTED)}. Pass a User or a "
                f"callable that returns one, or solo=True."
            )
        module, _, name = _SCRIPTED[domain].partition(":")
        return getattr(importlib.import_module(module), name)()
    return user() if callable(user) else user.fork()


def _ask(turn: Callable[[], UserAction]) -> UserAction:
    try:
        return turn()
    except Exception as error:
        raise EnvironmentFault(f"the user failed: {type(error).__name__}: {error}") from error


def _respond(episode: Episode, actor: str, call: ToolCall) -> Message:
    """Run a call on the world, record it and return the answer."""
    arguments = copy_value(dict(call.arguments))
    try:
        result = episode.world.get_response(
            Tau2ToolCall.model_construct(id=call.id, name=call.name, arguments=arguments, requestor=actor)
        )
        if result.error:  # a call that failed midway skips the package's sync
            episode.world.sync_tools()
    except Exception as error:
        raise EnvironmentFault(f"tool {call.name!r} broke: {type(error).__name__}: {error}") from error
    message = Message("tool", result.content, tool_call_id=call.id, error=result.error)
    episode.record.append((actor, Message(actor, "", tool_calls=(call,))))
    episode.record.append((actor, message))
    return message


def _history(task: Task) -> list[tuple[str, Message]]:
    """The messages that a task (of mock) starts after."""
    state = task.initial_state
    record = []
    for message in (state.message_history or []) if state else []:
        if message.role == "tool":
            record.append((message.requestor, Message("tool", message.content, (), message.id, message.error)))
        else:
            calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls or ())
            record.append((message.role, Message(message.role, message.content or "", calls)))
    return record
