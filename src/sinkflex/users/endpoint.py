"""A user simulated by a language model behind any OpenAI-compatible server, prompted as tau2's own simulator is.

The model sees the conversation from the user's side: the agent's words as "user", its own as "assistant". Its system
text is the package's guidelines and the task's scenario; in telecom it gets the user's tools. It ends the conversation
with one of tau2's three tokens, anywhere in a message without tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from functools import cache
from typing import Any

from sinkflex.envs.env import Message, ToolCall, spoken
from sinkflex.envs.tau2.actions import user_tools
from sinkflex.envs.tau2.policies import GREETING
from sinkflex.envs.tau2.tasks import DATA_DIR
from sinkflex.users.chat_server import ChatServer, Unusable
from sinkflex.users.user import UserAction, UserStop

_STOPS = {
    "###STOP###": UserStop.STOP,
    "###TRANSFER###": UserStop.TRANSFER,
    "###OUT-OF-SCOPE###": UserStop.OUT_OF_SCOPE,
}
_STOP = re.compile("|".join(_STOPS))


class EndpointUser:
    """A model that plays the user; follows the `User` protocol.

    Args:
        server: where the model is served.
        parameters: further fields of each request, such as "temperature" and "max_tokens". "seed" is the episode's
            unless it is given here.

    A server that fails raises `EnvironmentFault`, so that the episode is invalid and never a score of 0. Replies are as
    deterministic as the server is.
    """

    kind = "endpoint"
    waits = True  # conversations wait for the server at the same time

    def __init__(self, server: ChatServer, parameters: Mapping[str, Any] | None = None) -> None:
        self.server = server
        self.parameters = {"temperature": 0.0, **(parameters or {})}

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start a conversation on a tau2 task: the model answers the agent's greeting.

        Raises:
            EnvironmentFault: the server failed.
        """
        self._seed = seed % 2**31
        self._tools = user_tools(getattr(task.user_scenario.instructions, "domain", "mock"))
        self._messages: tuple[dict[str, Any], ...] = (
            {"role": "system", "content": system_text(task, bool(self._tools))},
        )
        return self._continue({"role": "user", "content": GREETING})

    def reply(self, text: str) -> UserAction:
        """Answer the agent's text.

        Raises:
            EnvironmentFault: the server failed.
        """
        return self._continue({"role": "user", "content": text})

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Continue after the results of the user's own tool calls.

        Raises:
            EnvironmentFault: the server failed.
        """
        return self._continue(
            *({"role": "tool", "content": result.content, "tool_call_id": result.tool_call_id} for result in results)
        )

    def fork(self) -> EndpointUser:
        """Return an independent copy in the same state."""
        return copy(self)

    def _continue(self, *heard: dict[str, Any]) -> UserAction:
        messages = (*self._messages, *heard)
        body: dict[str, Any] = {"messages": messages, "seed": self._seed, **self.parameters}
        if self._tools:
            body["tools"] = self._tools
        said, action = self.server.complete(body, lambda message: self._read(message, len(messages)))
        self._messages = (*messages, said)
        return action

    def _read(self, message: Mapping[str, Any], position: int) -> tuple[dict[str, Any], UserAction]:
        """Return a server's message as it goes into the history, and what the user does by it."""
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise Unusable(f"content that is a {type(content).__name__}")
        content = spoken(content)
        calls = _calls(message.get("tool_calls") or (), position)
        if calls:
            if not self._tools:
                raise Unusable("tool calls of a user without tools")
            return _tool_message(content, calls), UserAction(tool_calls=calls)
        stop = _STOP.search(content)
        text = _STOP.sub("", content).strip() or None
        if text is None and stop is None:
            raise Unusable("an empty message")
        return {"role": "assistant", "content": content}, UserAction(text, stop=_STOPS[stop[0]] if stop else None)


def system_text(task: Any, tools: bool) -> str:
    """Return the simulator's system text: the package's guidelines and the task's scenario, as tau2 puts them together.

    Args:
        task: a tau2 task.
        tools: the guidelines for a user that has tools.
    """
    return f"{_guidelines(tools)}\n\n<scenario>\n{task.user_scenario}\n</scenario>"


@cache
def _guidelines(tools: bool) -> str:
    name = "simulation_guidelines_tools.md" if tools else "simulation_guidelines.md"
    return (DATA_DIR / "tau2" / "user_simulator" / name).read_text("utf-8")


def _calls(values: Any, position: int) -> tuple[ToolCall, ...]:
    calls = []
    for i, value in enumerate(values):
        try:
            name, arguments = value["function"]["name"], value["function"]["arguments"]
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Unusable(f"a tool call that cannot be read ({type(error).__name__})") from None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise Unusable("a tool call without a name or an object of arguments")
        calls.append(ToolCall(name, arguments, str(value.get("id") or f"user_call_{position}_{i}")))
    return tuple(calls)


def _tool_message(content: str, calls: tuple[ToolCall, ...]) -> dict[str, Any]:
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": made}
