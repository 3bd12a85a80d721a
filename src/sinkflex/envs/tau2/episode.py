"""The state of one episode, and what happens in it: tools answer, the user is heard, everything is recorded."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tau2.data_model.message import ToolCall as Tau2ToolCall
from tau2.data_model.tasks import Task
from tau2.environment.environment import Environment

from sinkflex.envs.env import EnvironmentFault, Message, StopReason, ToolCall, ToolFault, UserFault
from sinkflex.envs.tau2 import policies, scoring
from sinkflex.envs.tau2.database import fork_world, new_world
from sinkflex.envs.tau2.tasks import TaskSpec, read
from sinkflex.users.user import User, UserAction, UserStop

MAX_USER_ROUNDS = 50
COUNTS = ("turns", "errors", "parse_errors", "unknown_tool_calls", "wrong_owner_calls")

_SCRIPTED = {
    "telecom": "sinkflex.users.telecom:TelecomUser",
    "retail": "sinkflex.users.retail:RetailUser",
    "airline": "sinkflex.users.airline:AirlineUser",
    "mock": "sinkflex.users.mock:MockUser",
}
_STOPS = {
    UserStop.STOP: StopReason.USER_STOP,
    UserStop.TRANSFER: StopReason.TRANSFER,
    UserStop.OUT_OF_SCOPE: StopReason.OUT_OF_SCOPE,
}


@dataclass(slots=True)
class Episode:
    """Everything that changes during an episode.

    Attributes:
        world: the databases and their tools.
        user: None in solo.
        record: (actor, message) in order, as the package's evaluator would see it: what agent ("assistant") and user
            ("user") said and called, and the tools' answers under the actor that asked.
        counts: of `COUNTS`; errors are failed or refused calls and unusable actions.
        stop_reason: None while the episode runs.
    """

    spec: TaskSpec
    task: Task
    world: Environment
    user: User | None
    record: list[tuple[str, Message]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    stop_reason: StopReason | None = None

    @property
    def calls(self) -> list[ToolCall]:
        """Every call so far, of both sides."""
        return [call for _, message in self.record for call in message.tool_calls]

    @property
    def texts(self) -> list[str]:
        """Every text of the agent so far."""
        return [m.content for actor, m in self.record if actor == m.role == "assistant" and not m.tool_calls]

    def fork(self) -> Episode:
        """Return an independent copy."""
        return dataclasses.replace(
            self,
            world=fork_world(self.world),
            user=self.user.fork() if self.user else None,
            record=list(self.record),
            counts=dict(self.counts),
        )

    def call(self, actor: str, call: ToolCall) -> Message:
        """Run a call on the world and return the tool's answer.

        Raises:
            EnvironmentFault: the tool broke in a way that its package does not turn into an answer.
        """
        request = Tau2ToolCall.model_construct(
            id=call.id, name=call.name, arguments=copy.deepcopy(dict(call.arguments)), requestor=actor
        )
        try:
            result = self.world.get_response(request)
            if result.error:  # a call that failed midway has skipped the package's sync
                self.world.sync_tools()
        except Exception as error:
            raise ToolFault(f"tool {call.name!r} broke: {type(error).__name__}: {error}") from error
        answer = Message("tool", result.content or "", tool_call_id=call.id, error=result.error)
        self.record += [(actor, Message(actor, "", tool_calls=(call,))), (actor, answer)]
        return answer

    def hear(self, user_turn: Callable[[], UserAction]) -> tuple[Message, ...]:
        """Take the user's turn, let it use its tools until it speaks or stops, and return what the agent hears.

        Raises:
            EnvironmentFault: the user raised, said nothing at all, or never came to an end.
        """
        for _ in range(MAX_USER_ROUNDS):
            try:
                reply = user_turn()
            except Exception as error:
                raise UserFault(f"the user failed: {type(error).__name__}: {error}") from error
            results = tuple(
                self.call("user", dataclasses.replace(call, id=call.id or f"user_call_{len(self.record)}"))
                for call in reply.tool_calls
            )
            if reply.stop is not None:
                self.stop_reason = _STOPS[reply.stop]
            if reply.stop is not None or not results:
                return self._spoken(reply)
            assert self.user is not None, "nobody hears a solo episode"
            user_turn = _observation(self.user, results)
        raise UserFault(f"the user used its tools {MAX_USER_ROUNDS} times without a word")

    def _spoken(self, reply: UserAction) -> tuple[Message, ...]:
        if not reply.text:
            if reply.stop is None:
                raise UserFault("the user neither spoke nor acted nor stopped")
            return ()
        message = Message("user", reply.text)
        self.record.append(("user", message))
        return (message,)


def start(spec: TaskSpec, user: User | None, seed: int) -> tuple[Episode, tuple[Message, ...]]:
    """Start an episode and return it with the first observation.

    Args:
        spec: the task.
        user: who the agent talks to; None for a solo episode.
        seed: the user's seed.

    Raises:
        EnvironmentFault: the task's initial state or the user broke.
    """
    task = read(spec.domain, spec.task_id)
    world = new_world(spec.domain)
    try:
        scoring.initialize(world, task)
    except Exception as error:
        raise EnvironmentFault(f"task {spec.task_id!r} cannot be set up: {error}") from error
    world.solo_mode = user is None  # now the agent may call the user's tools
    episode = Episode(spec, task, world, user, _history(task))
    seen = tuple(message for actor, message in episode.record if (actor, message.role) != ("user", "tool"))
    if user is None:
        return episode, (*seen, Message("user", policies.ticket(task)))
    if not seen:
        episode.record.append(("assistant", Message("assistant", policies.GREETING)))
    observation = episode.hear(lambda: user.reset(task, seed))
    if episode.stop_reason is not None:
        raise UserFault("the user ended the conversation before the agent's first turn")
    return episode, (*seen, *observation)


def make_user(user: str | User | Callable[[], User], domain: str) -> User:
    """Return a user for one episode: the domain's scripted one, a fork of a prototype, or what a callable makes.

    Raises:
        ValueError: the domain has no user of this name.
    """
    if isinstance(user, str):
        if user != "scripted" or domain not in _SCRIPTED:
            raise ValueError(
                f"no user {user!r} for {domain}: 'scripted' exists for {', '.join(_SCRIPTED)}. Pass a User or a "
                f"callable that returns one, or solo=True."
            )
        module, _, name = _SCRIPTED[domain].partition(":")
        return getattr(importlib.import_module(module), name)()
    return user() if callable(user) else user.fork()


def _observation(user: User, results: tuple[Message, ...]) -> Callable[[], UserAction]:
    return lambda: user.observe(results)


def _history(task: Task) -> list[tuple[str, Message]]:
    """The messages that a task starts after (some of mock's do)."""
    record: list[tuple[str, Message]] = []
    history = task.initial_state and task.initial_state.message_history
    for message in cast(Sequence[Any], history or ()):
        if message.role == "tool":
            record.append((message.requestor, Message("tool", message.content, (), message.id, message.error)))
        else:
            calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls or ())
            record.append((message.role, Message(message.role, message.content or "", calls)))
    return record
