"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` repeated.

The second form may have `[CALL_ID]id` after the name. What stands before the calls is a note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import (
    Format,
    Malformed,
    call_of,
    new_call,
    read_json,
    reader,
    skip_blanks,
    write_json,
)

CALLS = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\])?\s*(?={)")


def _parse(text: str) -> tuple[str, list[ToolCall]]:
    at = text.find(CALLS)
    note = text[: at if at >= 0 else len(text)]
    if "[ARGS]" in note or "[CALL_ID]" in note:
        raise Malformed(f"a call begins with {CALLS}")
    calls: list[ToolCall] = []
    while 0 <= at < len(text):
        if not text.startswith(CALLS, at):
            raise Malformed(f"after tool call {len(calls)} comes neither {CALLS} nor the end")
        at = skip_blanks(text, at + len(CALLS))
        if text.startswith(("[", "{"), at):
            value, at = read_json(text, at, f"what follows {CALLS}")
            values = value if isinstance(value, list) else [value]
            if not values:
                raise Malformed(f"{CALLS} [] holds no call")
            for item in values:
                calls.append(call_of(item, len(calls)))
        elif head := _HEAD.match(text, at):
            arguments, at = read_json(text, head.end(), f"what follows the name of tool call {len(calls) + 1}")
            calls.append(new_call(head[1], arguments, len(calls), head[2]))
        else:
            raise Malformed(f"after {CALLS} comes neither a list of calls nor name[ARGS]{{...}}")
    if len({call.id for call in calls}) != len(calls):
        raise Malformed("two calls have the same id")
    return note, calls


def _write(calls: Sequence[ToolCall]) -> str:
    return f"{CALLS} " + write_json([{"name": c.name, "arguments": dict(c.arguments), "id": c.id} for c in calls])


MISTRAL = Format("mistral", (CALLS,), reader(_parse, CALLS), _write)
