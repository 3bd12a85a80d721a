"""The contract between agent and environment.

An environment is a `gymnasium.Env` whose actions are `Action` and whose observations are tuples of `Message`.
One `step` is one agent turn: text to the user, or one or several tool calls that run in order.

Example: the agent asks for something and the user answers.

    env.reset(seed=0, options={"task_id": "..."})   -> ((Message("user", "My data is slow."),), info)
    env.step(Action(text="Please run a speed test."))
        -> ((Message("user", "Speed Test Result: 275 Mbps"),), 0.0, False, False, {"stop_reason": None})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class StopReason(StrEnum):
    """Why an episode ended.

    The first four terminate it (the task's own end), the next three truncate it (a limit), the rest are faults: they
    make it invalid.
    """

    USER_STOP = "user_stop"
    TRANSFER = "transfer"
    OUT_OF_SCOPE = "out_of_scope"
    AGENT_STOP = "agent_stop"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TOO_MANY_ERRORS = "too_many_errors"
    FAULT = "fault"
    USER_FAULT = "user_fault"
    TOOL_FAULT = "tool_fault"
    REWARD_FAULT = "reward_fault"
    DEADLINE = "deadline"
    MEMORY = "memory"

    @property
    def terminated(self) -> bool:
        """True if the task itself ended the episode, False if a limit or a fault did."""
        return self in (StopReason.USER_STOP, StopReason.TRANSFER, StopReason.OUT_OF_SCOPE, StopReason.AGENT_STOP)


class EnvironmentFault(RuntimeError):
    """The environment or its user broke (a dead server, a bug). The episode is invalid; it never scores 0.

    Attributes:
        stop_reason: which part broke.
        info: what `reset` or `step` would have returned as info, as far as it is known; the environment fills it in.
    """

    stop_reason: ClassVar[StopReason] = StopReason.FAULT

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.info: dict[str, Any] = {}


class UserFault(EnvironmentFault):
    """The user broke, or its server."""

    stop_reason = StopReason.USER_FAULT


class ToolFault(EnvironmentFault):
    """A tool broke in a way that is no answer."""

    stop_reason = StopReason.TOOL_FAULT


class DeadlineFault(EnvironmentFault):
    """A call of the environment took longer than it may."""

    stop_reason = StopReason.DEADLINE


class MemoryFault(EnvironmentFault):
    """A call of the environment took more memory than it may."""

    stop_reason = StopReason.MEMORY


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by name with keyword arguments; `id` pairs it with its result."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """What the agent does in one turn: text, or tool calls, or (when its output could not be parsed) an error.

    An error costs the turn and comes back as an observation. It is never shown to the user.

    Attributes:
        raw: the whole output that was parsed into this, thinking and stop token included, for later prompts.
    """

    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    raw: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation as the agent sees it.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: the text; for a tool message the tool's result. Half a surrogate pair, which JSON from a server can
            hold and no tokenizer takes, becomes U+FFFD.
        tool_calls: calls made by an assistant message.
        tool_call_id: on a tool message, the id of the call it answers.
        error: a tool message that reports an error, or the answer to an action that could not be parsed.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    error: bool = False

    def __post_init__(self) -> None:
        if not self.content.isascii():
            object.__setattr__(self, "content", _HALF_PAIR.sub("\ufffd", self.content))


def spoken(text: str) -> str:
    """Return a text without its thinking, which may lack its end, and without the blanks around it."""
    return _THINKING.sub("", text).strip()
