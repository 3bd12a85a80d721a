"""Hermes, Qwen, SmolLM and relatives: `a note <tool_call>{"name": "get_line", "arguments": {...}}</tool_call>`.

One pair of tags may also hold a list of calls. What stands outside the tags is a note that the user does not see.
"""

from __future__ import annotations

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import Format, Malformed, call_of, read_json, reader, write_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _parse(text: str) -> tuple[str, list[ToolCall]]:
    notes: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        notes.append(text[at:start])
        value, at = read_json(text, start + len(OPEN), f"tool call {len(calls) + 1}")
        if not text.startswith(CLOSE, at):
            raise Malformed(f"tool call {len(calls) + 1} is not closed by {CLOSE}")
        at += len(CLOSE)
        values = value if isinstance(value, list) else [value]
        if not values:
            raise Malformed(f"{OPEN}[]{CLOSE} holds no call")
        for item in values:
            calls.append(call_of(item, len(calls)))
    notes.append(text[at:])
    if any(CLOSE in note for note in notes):
        raise Malformed(f"{CLOSE} closes nothing: a call begins with {OPEN}")
    return "\n".join(note.strip() for note in notes if note.strip()), calls


HERMES = Format(
    "hermes",
    (OPEN,),
    reader(_parse, OPEN),
    lambda calls: "\n".join(
        f"{OPEN}\n{write_json({'name': call.name, 'arguments': dict(call.arguments)})}\n{CLOSE}" for call in calls
    ),
)
