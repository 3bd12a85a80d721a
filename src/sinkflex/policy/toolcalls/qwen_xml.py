"""Qwen3-Coder and Qwen3.5: `<tool_call><function=get_line><parameter=line_id>L1</parameter></function></tool_call>`.

A value stands as it is: text unquoted, numbers and lists as JSON, and True or None as Python writes them, since chat
templates do. So `5` is a number unless the tool's schema says text. A text that would be read as something else is
written as a JSON string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import Format, Malformed, Reply, new_call, read_json, reader, write_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")  # in a value, they show that its end was lost
_HEAD = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_TAIL = re.compile(r"</function>\s*</tool_call>")
_PYTHON = {"True": True, "False": False, "None": None}
Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by tool


def _parse(text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    notes: list[str] = []
    calls: list[ToolCall] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        notes.append(text[at:start])
        what = f"tool call {len(calls) + 1}"
        head = _HEAD.match(text, start + len(OPEN))
        if head is None:
            raise Malformed(f"{what} does not begin with <function=NAME>")
        arguments: dict[str, Any] = {}
        fields = schemas.get(head[1].strip(), {})
        at = head.end()
        while found := _PARAMETER.match(text, at):
            name, at = found[1], found.end()
            if name in arguments:
                raise Malformed(f"{what} has a parameter twice")
            if any(tag in found[2] for tag in _TAGS):
                raise Malformed(f"{what} has a parameter that is not closed by </parameter>")
            arguments[name] = _typed(found[2], fields.get(name, {}))
        tail = _TAIL.match(text, at)
        if tail is None:
            raise Malformed(f"after {len(arguments)} parameters of {what} comes neither another one nor </function>")
        at = tail.end()
        calls.append(new_call(head[1], arguments, len(calls)))
    notes.append(text[at:])
    if any(tag in note for note in notes for tag in (CLOSE, *_TAGS)):
        raise Malformed(f"a call begins with {OPEN} and ends with {CLOSE}")
    return "\n".join(note.strip() for note in notes if note.strip()), calls


def _value(text: str) -> Any:
    text.encode()  # half of a surrogate pair cannot be written to a file
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        value, end = read_json(text, 0, "")
    except Malformed:
        return text
    return value if end == len(text) else text


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for; it stays text where the schema takes text and not that value."""
    value, kinds = _value(text), _kinds(schema)
    names = {type(None): ("null",), bool: ("boolean",), int: ("integer", "number"), float: ("number",)}
    own = names.get(type(value), ("array",) if isinstance(value, list) else ("object",))
    return text if "string" in kinds and (isinstance(value, str) or not kinds & set(own)) else value


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema takes, as far as it names them."""
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else set(named)
    return kinds.union(*(_kinds(choice) for key in ("anyOf", "oneOf") for choice in schema.get(key, ())))


def _written(value: Any) -> str:
    if not isinstance(value, str):
        return write_json(value)
    plain = _value(value) == value and not any(tag in value for tag in _TAGS)
    return value if plain else write_json(value).replace("<", "\\u003c")


def _write(calls: Sequence[ToolCall]) -> str:
    lines = []
    for call in calls:
        fields = [f"<parameter={name}>\n{_written(x)}\n</parameter>" for name, x in call.arguments.items()]
        lines += [OPEN, f"<function={call.name}>", *fields, "</function>", CLOSE]
    return "\n".join(lines)


def _knowing(tools: Sequence[Mapping[str, Any]]) -> Callable[[str], Reply]:
    functions = [tool["function"] for tool in tools]
    schemas = {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}
    return reader(partial(_parse, schemas=schemas), OPEN)


QWEN_XML = Format("qwen_xml", ("<function=",), _knowing([]), _write, knowing=_knowing)
