"""The contract of a user: who the agent talks to, and in dual control a second actor with tools of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from sinkflex.envs.env import Message, ToolCall


class UserStop(StrEnum):
    """How a user ends the conversation (the three stop tokens of tau2's simulator)."""

    STOP = "stop"
    TRANSFER = "transfer"
    OUT_OF_SCOPE = "out_of_scope"


@dataclass(frozen=True, slots=True)
class UserAction:
    """What the user does: says text, or calls its own tools, or ends the conversation (optionally with last words)."""

    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop: UserStop | None = None


class User(Protocol):
    """A user simulator. Its state is its own; equal task, seed and inputs give equal replies.

    Attributes:
        kind: "scripted", "endpoint", "replay" or "none"; stored in every trajectory.
    """

    kind: str

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start a conversation on this task and return the opening words."""
        ...

    def reply(self, text: str) -> UserAction:
        """Answer the agent's text."""
        ...

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Continue after the results of this user's own tool calls (role "tool", same order)."""
        ...

    def fork(self) -> User:
        """Return an independent copy in the same state."""
        ...
