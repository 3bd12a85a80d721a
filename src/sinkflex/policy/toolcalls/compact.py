"""The tiny policy's own format, short for a small vocabulary: `<|call|>get_line {"line_id": "L1"}<|call|>other {}`."""

from __future__ import annotations

import re

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import Format, Malformed, new_call, read_json, reader, write_json

CALL = "<|call|>"
_NAME = re.compile(r"\s*([^\s{<]*)\s*")


def _parse(text: str) -> tuple[str, list[ToolCall]]:
    at = text.find(CALL)
    if at < 0:
        return text, []
    if text[:at].strip():
        raise Malformed("text and tool calls may not be mixed in one message")
    calls: list[ToolCall] = []
    while at < len(text):
        if not text.startswith(CALL, at):
            raise Malformed(f"after the arguments of tool call {len(calls)} comes neither another one nor the end")
        match = _NAME.match(text, at + len(CALL))
        assert match is not None
        name, at, arguments = match[1], match.end(), {}
        if at < len(text) and not text.startswith(CALL, at):
            arguments, at = read_json(text, at, f"what follows the name of tool call {len(calls) + 1}")
        calls.append(new_call(name, arguments, len(calls)))
    return "", calls


COMPACT = Format(
    "compact",
    (CALL,),
    reader(_parse, CALL),
    lambda calls: "".join(f"{CALL}{call.name} {write_json(dict(call.arguments))}" for call in calls),
)
