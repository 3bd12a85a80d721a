"""Parsers from sampled text to an `Action`. Malformed calls become a parse error; nothing is dropped or invented.

Two formats:

    compact   <|call|>get_line {"line_id": "L1"}<|call|>other {}          (the tiny policy's own)
    hermes    text <tool_call>{"name": "get_line", "arguments": {...}}</tool_call>   (Qwen, SmolLM2 and relatives)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sinkflex.envs.env import Action, ToolCall

CALL = "<|call|>"
HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_compact(text: str) -> Action:
    """Parse the tiny policy's format: either plain text, or one or several `<|call|>name {json}`."""
    if CALL not in text:
        return Action(text=text.strip()) if text.strip() else Action(error="empty message")
    before, *pieces = text.split(CALL)
    if before.strip():
        return Action(error="text and tool calls may not be mixed in one message")
    calls = []
    for index, piece in enumerate(pieces):
        name, _, arguments = piece.strip().partition(" ")
        call = _call(name, arguments or "{}", index)
        if isinstance(call, str):
            return Action(error=call)
        calls.append(call)
    return Action(tool_calls=tuple(calls))


def parse_hermes(text: str) -> Action:
    """Parse Hermes/Qwen calls; text beside calls is reasoning and is not shown to the user."""
    bodies = HERMES_CALL.findall(text)
    if not bodies:
        if "<tool_call>" in text:
            return Action(error="a <tool_call> is not closed by </tool_call>")
        return Action(text=text.strip()) if text.strip() else Action(error="empty message")
    calls = []
    for index, body in enumerate(bodies):
        try:
            value = _strict_json(body)
        except (ValueError, RecursionError) as error:
            return Action(error=f"tool call {index + 1} is not valid JSON: {error}")
        if not isinstance(value, dict):
            return Action(error=f"tool call {index + 1} must be a JSON object with name and arguments")
        arguments = value.get("arguments", {})
        call = _call(value.get("name"), arguments if isinstance(arguments, str) else json.dumps(arguments), index)
        if isinstance(call, str):
            return Action(error=call)
        calls.append(call)
    return Action(tool_calls=tuple(calls))


def _call(name: object, arguments: str, index: int) -> ToolCall | str:
    """Return the call, or what is wrong with it."""
    if not isinstance(name, str) or not name:
        return f"tool call {index + 1} has no name"
    try:
        value = _strict_json(arguments)
    except (ValueError, RecursionError) as error:
        return f"the arguments of {name[:60]} are not valid JSON: {error}"
    if not isinstance(value, dict):
        return f"the arguments of {name[:60]} must be a JSON object"
    return ToolCall(name=name, arguments=value, id=f"call_{index}")


def _strict_json(text: str) -> Any:
    """Return the value, if it can be written again: Python also reads NaN, 1e999 and halves of a surrogate pair.

    Raises:
        ValueError: it cannot, or the text is no JSON at all.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


PARSERS: dict[str, Callable[[str], Action]] = {"compact": parse_compact, "hermes": parse_hermes}


def parser_for(chat_template: str) -> Callable[[str], Action]:
    """Return the parser that a chat template's way of writing tool calls asks for."""
    return parse_compact if CALL in chat_template else parse_hermes
