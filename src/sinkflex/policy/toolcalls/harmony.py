"""Harmony, the format of gpt-oss: a turn is one or several messages, each on a channel.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.get_line
    <|constrain|>json<|message|>{"line_id": "L1"}<|call|>

A message to `functions.NAME` is a call, on whatever channel, whether the recipient stands before or after the channel,
with or without a content type. `final` is for the user, `analysis` is thinking, `commentary` to nobody a note. The
turn begins after `<|start|>assistant`, and its last token is a stop token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import (
    Format,
    Malformed,
    Reply,
    malformed,
    new_call,
    read_json,
    skip_blanks,
    write_json,
)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MARK = re.compile(r"<\|(?:start|end|message|channel|constrain|call|return)\|>")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<before>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>analysis|commentary|final)\b\s*(?:to=(?P<after>[^\s<]+))?)?\s*"
    r"(?:(?:<\|constrain\|>)?\s*[\w/+.-]+)?\s*<\|message\|>"
)
FUNCTIONS = "functions."


def _read(output: str) -> Reply:
    if not _MARK.search(output) and "to=functions" not in output:
        return Reply(output.strip())
    parts: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    calls: list[ToolCall] = []
    at = 0
    try:
        while at < len(output):
            at = _message(output, at, parts, calls)
    except ValueError as error:
        return malformed(output, error)
    thinking, notes, final = ("\n".join(part for part in parts[name] if part) for name in parts)
    return Reply("\n".join(filter(None, (notes, final))) if calls else final or notes, thinking, tuple(calls))


def _message(output: str, at: int, parts: dict[str, list[str]], calls: list[ToolCall]) -> int:
    """Read the message at a place into parts and calls, and return the place after it."""
    header = _HEADER.match(output, at)
    if header is None:
        raise Malformed(
            f"a message reads {CHANNEL}final{MESSAGE}text, or {CHANNEL}commentary to={FUNCTIONS}NAME{MESSAGE}{{...}}"
        )
    body = header.end()
    recipient = header["before"] or header["after"]
    if recipient is None:
        end = _END.search(output, body)
        assert end is not None
        if stray := _MARK.search(output, body, end.start()):
            raise Malformed(f"{stray.group()} is out of place")
        parts[header["channel"] or "final"].append(output[body : end.start()].strip())
        return skip_blanks(output, end.end())
    if header["before"] and header["after"] not in (None, header["before"]):
        raise Malformed("a message has two recipients")
    name = recipient.removeprefix(FUNCTIONS)
    if name == recipient:
        raise Malformed(f"there is no recipient {recipient[:60]}: call to={FUNCTIONS}NAME")
    if header["channel"] == "final":
        raise Malformed("a call stands on the commentary channel, not on final")
    arguments, after = read_json(output, body, f"the arguments of {name[:60]}")
    end = _END.match(output, after)
    if end is None:
        raise Malformed(f"after the arguments of {name[:60]} comes something else than the end of the message")
    calls.append(new_call(name, arguments, len(calls)))
    return skip_blanks(output, end.end())


def _write(calls: Sequence[ToolCall]) -> str:
    # Between calls <|end|>: <|call|> would end the turn.
    return f"<|end|>{START}assistant".join(
        f"{CHANNEL}commentary to={FUNCTIONS}{c.name} <|constrain|>json{MESSAGE}{write_json(dict(c.arguments))}"
        for c in calls
    )


def _form(reply: Reply) -> dict[str, str]:
    if reply.calls:
        thinking = "\n".join(filter(None, (reply.thinking, reply.text)))
        return {"content": "", **({"thinking": thinking} if thinking else {})}
    # An output that was cut off or malformed still has its marks, which the template refuses.
    return {"content": _MARK.sub(" ", reply.text), **({"thinking": reply.thinking} if reply.thinking else {})}


HARMONY = Format("harmony", (CHANNEL,), _read, _write, stops=("<|return|>", "<|call|>"), form=_form)
