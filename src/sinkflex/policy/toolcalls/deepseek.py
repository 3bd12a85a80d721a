"""DeepSeek: calls between tokens of their own. In V3.1, and in V3 and R1, where the arguments are a block of code:

    <｜tool▁call▁begin｜>get_line<｜tool▁sep｜>{"line_id": "L1"}<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_line (block) <｜tool▁call▁end｜>

All calls together stand between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>. What stands before them is a note.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import Format, Malformed, new_call, read_json, reader, skip_blanks, write_json

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(rf"{CALL}\s*(?:function{SEP}\s*([^\s<]+)\s*```(?:json)?|([^\s<]+)\s*{SEP})")
_BETWEEN = re.compile(rf"\s*(?:{CALLS})?\s*")
_AFTER = re.compile(rf"\s*(?:{CALLS_END})?\s*\Z")


def _parse(text: str) -> tuple[str, list[ToolCall]]:
    starts = [at for at in (text.find(CALLS), text.find(CALL)) if at >= 0]
    at = min(starts, default=len(text))
    note = text[:at]
    if any(mark in note for mark in (SEP, CALL_END, CALLS_END)):
        raise Malformed(f"a call begins with {CALL}")
    calls: list[ToolCall] = []
    while at < len(text) and not (calls and _AFTER.match(text, at)):
        between = _BETWEEN.match(text, at)
        head = _HEAD.match(text, between.end() if between and not calls else at)
        if head is None:
            raise Malformed(
                f"what follows tool call {len(calls)} is no call: it reads {CALL}name{SEP}{{...}}{CALL_END}"
            )
        arguments, at = read_json(text, head.end(), f"what follows the name of tool call {len(calls) + 1}")
        if head[1] and text.startswith("```", at):
            at = skip_blanks(text, at + 3)
        if not text.startswith(CALL_END, at):
            raise Malformed(f"tool call {len(calls) + 1} is not closed by {CALL_END}")
        at = skip_blanks(text, at + len(CALL_END))
        calls.append(new_call(head[1] or head[2], arguments, len(calls)))
    return note, calls


def _write(calls: Sequence[ToolCall]) -> str:
    written = (f"{CALL}{call.name}{SEP}{write_json(dict(call.arguments))}{CALL_END}" for call in calls)
    return f"{CALLS}{''.join(written)}{CALLS_END}"


DEEPSEEK = Format("deepseek", (CALL,), reader(_parse, CALLS, CALL), _write)
