"""What a sampled turn says, and what the formats have in common: strict JSON, calls, thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinkflex.envs.env import Action, ToolCall

OPEN_THINKING, CLOSE_THINKING = "<think>", "</think>"
_BLANKS = re.compile(r"\s*")
_CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a sampled turn says. Malformed calls make the whole turn an error; nothing is dropped or invented.

    Attributes:
        text: words to the user; a private note beside calls; the whole output if there is an error.
        thinking: reasoning as it was written, its tags included.
        calls: tool calls in order, each with an id of its own.
        error: why the output is no action, "" if it is one.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str = ""

    def action(self, raw: str) -> Action:
        """Return the action of the turn, with its output as sampled: exactly one of text, calls and error."""
        if self.error or self.calls:
            return Action(error=self.error or None, tool_calls=self.calls, raw=raw)
        return Action(text=self.text, raw=raw) if self.text else Action(error="empty message", raw=raw)

    def says(self, other: Reply) -> bool:
        """True if both say the same without an error, whatever blanks stand around it and however JSON is spaced."""
        return not self.error and not other.error and self._content() == other._content()

    def _content(self) -> tuple[Any, ...]:
        thinking = self.thinking.replace(OPEN_THINKING, "").replace(CLOSE_THINKING, "").strip()
        return (
            self.text.strip(),
            bool(self.thinking),
            thinking,
            [(call.name, write_json(dict(call.arguments))) for call in self.calls],
        )


@dataclass(frozen=True, slots=True)
class Format:
    """One way of writing tool calls.

    Attributes:
        name: what `prompt.tool_format` calls it.
        markers: a chat template or vocabulary that has one of these strings writes this format.
        read: what a turn says, its stop token taken off; fails for no text at all.
        write: the text that makes these calls.
        stops: tokens that end a turn besides the one that ends a text.
        form: fields of the assistant message that a chat template takes, calls left out.
        knowing: returns a `read` that knows the tools' schemas, where a value's type does not show in the text.
    """

    name: str
    markers: tuple[str, ...]
    read: Callable[[str], Reply]
    write: Callable[[Sequence[ToolCall]], str]
    stops: tuple[str, ...] = ()
    form: Callable[[Reply], dict[str, str]] = lambda reply: {
        "content": f"{reply.thinking}\n\n{reply.text}" if reply.thinking else reply.text
    }
    knowing: Callable[[Sequence[Mapping[str, Any]]], Callable[[str], Reply]] | None = None


class Malformed(ValueError):
    """What is wrong with an output, in words for the model."""


def reader(parse: Callable[[str], tuple[str, list[ToolCall]]], *begins: str) -> Callable[[str], Reply]:
    """Make a format's `read` from a parser of outputs without thinking.

    Args:
        parse: returns what stands outside the calls, and the calls; raises ValueError or RecursionError.
        begins: what a call begins with.
    """

    def read(output: str) -> Reply:
        try:
            thinking, rest = split_thinking(output, begins)
            text, calls = parse(rest)
        except (ValueError, RecursionError) as error:
            return malformed(output, error)
        return Reply(text.strip(), thinking, tuple(calls))

    return read


def malformed(output: str, error: Exception) -> Reply:
    """Return the reply that an output is which cannot be read; what the error quotes can be written to a file."""
    return Reply(text=output, error=str(error).encode(errors="replace").decode())


def split_thinking(output: str, begins: Sequence[str]) -> tuple[str, str]:
    """Return (thinking, the rest): the blocks before the first call, for later ones may stand inside arguments.

    The first block may lack its opening tag, where neither the model nor the prompt wrote it.

    Args:
        output: a turn.
        begins: what a call begins with.

    Raises:
        Malformed: a block is not closed.
    """
    blocks, rest, at = [], [], 0
    while True:
        begin = min((k for k in (output.find(mark, at) for mark in begins) if k >= 0), default=len(output))
        start, end = output.find(OPEN_THINKING, at, begin), output.find(CLOSE_THINKING, at, begin)
        if start < 0 and end < 0:
            return "".join(blocks).strip(), "".join(rest) + output[at:]
        if start < 0 or 0 <= end < start:
            if blocks or rest:
                raise Malformed(f"{CLOSE_THINKING} closes nothing")
            start = at
        end = output.find(CLOSE_THINKING, start)
        if end < 0:
            raise Malformed(f"the thinking is not closed by {CLOSE_THINKING}")
        rest.append(output[at:start])
        at = end + len(CLOSE_THINKING)
        blocks.append(output[start:at])


def read_json(text: str, at: int, what: str) -> tuple[Any, int]:
    """Return the JSON value at a place, and the place after it and the blanks that follow.

    It can be written again: Python also reads NaN, 1e999, repeated keys and halves of a surrogate pair.

    Raises:
        Malformed: there is no such value; `what` names it.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_blanks(text, at))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} is not valid JSON: {_reason(error, at)}") from error
    return value, skip_blanks(text, end)


def skip_blanks(text: str, at: int) -> int:
    """Return the first place from `at` on that is no blank."""
    match = _BLANKS.match(text, at)
    assert match is not None
    return match.end()


def write_json(value: Any) -> str:
    """Return the JSON that chat templates write."""
    return json.dumps(value, ensure_ascii=False)


def call_id(index: int) -> str:
    """Return the id of a turn's call: nine letters and digits, as Mistral's templates demand."""
    return f"call{index:05d}"


def new_call(name: object, arguments: object, index: int, given: object = None) -> ToolCall:
    """Return the call number `index` of a turn.

    Args:
        name, arguments: as written; arguments may be the text of a JSON object.
        index: from 0.
        given: an id that the model wrote.

    Raises:
        Malformed: it is no call.
    """
    if not isinstance(name, str) or not name.strip():
        raise Malformed(f"tool call {index + 1} has no name")
    if isinstance(arguments, str):
        arguments, end = read_json(text := arguments, 0, f"the text of the arguments of {name[:60]}")
        if end != len(text):
            raise Malformed(f"the arguments of {name[:60]} are more than one JSON value")
    name.encode()
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of {name[:60]} must be a JSON object")
    return ToolCall(name.strip(), arguments, given if isinstance(given, str) and given else call_id(index))


def call_of(value: object, index: int) -> ToolCall:
    """Return the call that a JSON object with name and arguments describes.

    Raises:
        Malformed: it is none, or has keys that would be lost.
    """
    if not isinstance(value, Mapping):
        raise Malformed(f"tool call {index + 1} must be a JSON object with name and arguments")
    if unknown := sorted(set(value) - _CALL_KEYS):
        raise Malformed(f"tool call {index + 1} has an unknown key {unknown[0][:60]!r}; it takes name and arguments")
    if "arguments" in value and "parameters" in value:
        raise Malformed(f"tool call {index + 1} has both arguments and parameters")
    arguments = value.get("arguments", value.get("parameters", {}))
    return new_call(value.get("name"), arguments, index, value.get("id"))


def _reason(error: Exception, at: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - at}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Malformed("a key occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
