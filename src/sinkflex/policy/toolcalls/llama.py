"""Llama 3: a turn that is JSON, or Python after a tag.

    {"name": "get_line", "parameters": {"line_id": "L1"}}; {"name": "other", "parameters": {}}
    a note <|python_tag|>get_line.call(line_id="L1")
    [get_line(line_id="L1"), other()]

Nothing marks JSON as a call but that the whole turn is JSON. A call inside other text is an error, because nobody can
tell whether it was meant.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls.reply import Format, Malformed, call_of, new_call, read_json, reader, write_json

TAG = "<|python_tag|>"
LONGEST_PYTHON = 20_000
_PYTHON = re.compile(r"\[?\s*[A-Za-z_][\w.-]*\s*\(")
_BRACKETED = re.compile(r"\[\s*[A-Za-z_]\w*\s*\(")
_INSIDE = re.compile(r'"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:')


def _parse(text: str) -> tuple[str, list[ToolCall]]:
    whole = text.strip()
    if whole.startswith("{"):
        return "", _json_calls(whole)
    if _BRACKETED.match(whole) and whole.endswith("]"):
        return "", _python_calls(whole)
    note, tag, rest = text.partition(TAG)
    body = rest.strip()
    if body.startswith("{"):
        return note, _json_calls(body)
    if _PYTHON.match(body):
        return note, _python_calls(body)
    if tag:
        raise Malformed(f"after {TAG} comes neither a JSON object nor name(argument=value)")
    if _INSIDE.search(text):
        raise Malformed("text and a tool call may not be mixed in one message")
    return text, []


def _json_calls(body: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        value, at = read_json(body, at, f"tool call {len(calls) + 1}")
        calls.append(call_of(value, len(calls)))
        if body.startswith((";", ","), at):
            at += 1
        elif at < len(body) and body[at] != "{":
            raise Malformed(f"after tool call {len(calls)} comes neither another one nor the end")
    return calls


def _python_calls(body: str) -> list[ToolCall]:
    if len(body) > LONGEST_PYTHON:
        raise Malformed(f"a call in Python may have {LONGEST_PYTHON} characters; use JSON")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(body, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
            return [_python_call(node, index) for index, node in enumerate(nodes)]
    except (SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise Malformed(f"the call is not valid Python: {type(error).__name__}") from error


def _python_call(node: ast.expr, index: int) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Malformed(f"tool call {index + 1} must read name(argument=value)")
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    arguments: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    if len(arguments) != len(node.keywords):
        raise Malformed(f"tool call {index + 1} has an argument twice")
    # Through JSON, so that only what JSON can hold passes.
    return new_call(name.removesuffix(".call"), json.dumps(arguments), index)


LLAMA = Format(
    "llama",
    (TAG, "<|start_header_id|>"),
    reader(_parse, TAG),
    lambda calls: "; ".join(write_json({"name": c.name, "parameters": dict(c.arguments)}) for c in calls),
    stops=("<|eot_id|>", "<|eom_id|>"),
)
