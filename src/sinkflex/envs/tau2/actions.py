"""What the agent may do: tool schemas, the form of an action, argument coercion, and what is refused unheard."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from sinkflex.envs.env import Action, ToolCall, spoken
from sinkflex.envs.tau2.database import template
from sinkflex.envs.tau2.tasks import nearest

MAX_CALLS = 16
MAX_DEPTH = 32
DONE = "done"

_DONE_SCHEMA = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "End the episode: the ticket is solved, or it cannot be solved.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_STOP_TOKENS = re.compile(r"###(STOP|TRANSFER|OUT-OF-SCOPE)###")
_TYPES = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


@cache
def agent_tools(domain: str, solo: bool) -> tuple[dict[str, Any], ...]:
    """Return the agent's tools as OpenAI function schemas, `$defs` kept. In solo the user's tools and `done` too."""
    schemas = [tool.openai_schema for tool in template(domain).get_tools()]
    return (*schemas, *user_tools(domain), _DONE_SCHEMA) if solo else tuple(schemas)


@cache
def user_tools(domain: str) -> tuple[dict[str, Any], ...]:
    """Return the user's own tools as OpenAI function schemas; empty where the user has none."""
    world = template(domain)
    return tuple(tool.openai_schema for tool in world.get_user_tools()) if world.user_tools is not None else ()


@cache
def agent_tool_names(domain: str, solo: bool) -> frozenset[str]:
    """Return the names of the agent's tools."""
    return frozenset(schema["function"]["name"] for schema in agent_tools(domain, solo))


@cache
def user_tool_names(domain: str) -> frozenset[str]:
    """Return the names of the user's own tools."""
    return frozenset(schema["function"]["name"] for schema in user_tools(domain))


def as_action(action: Action | Mapping[str, Any]) -> Action:
    """Return an `Action` from one, or from a mapping of the same fields.

    Raises:
        ValueError: the mapping has an unknown field, or something else than these two was given.
    """
    if isinstance(action, Action):
        return action
    fields = _checked_fields(action, Action)
    calls = fields.get("tool_calls") or ()
    calls = tuple(call if isinstance(call, ToolCall) else ToolCall(**_checked_fields(call, ToolCall)) for call in calls)
    return Action(fields.get("text"), calls, fields.get("error"))


def visible_text(text: str) -> str:
    """Return what the user gets to read: without thinking, and without the tokens that end a user's conversation."""
    return _STOP_TOKENS.sub("", spoken(text)).strip()


def refusal(call: ToolCall, position: int) -> str | None:
    """Return why a call is not passed on to the tools, or None if it is.

    Args:
        call: the call.
        position: its index among the calls of its turn.
    """
    if position >= MAX_CALLS:
        return f"at most {MAX_CALLS} calls run in one turn; this one did not"
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        return "a call is a name and an object of arguments"
    if _deeper_than(MAX_DEPTH, call.arguments):
        return "the arguments are nested too deeply"
    if call.name == "calculate" and "**" in str(call.arguments.get("expression")):
        return "powers are not allowed in an expression"  # 9**9**9**9 would never return
    return None


@lru_cache(maxsize=256)  # a policy repeats its mistakes, and the search takes longer than most calls
def not_found_hint(domain: str, name: str, solo: bool) -> str:
    """Return what helps after the tools' own answer to a call of a tool that the agent does not have."""
    if name in user_tool_names(domain):
        return "It is a tool of the user: ask them to do it."
    return f"Of your tools {nearest(name, agent_tool_names(domain, solo))}."


def coerce(domain: str, call: ToolCall) -> ToolCall:
    """Return the call with each argument in the type that its schema asks for, where that is unambiguous.

    "3" and 3.0 become 3 for an integer, 19122 becomes "19122" for a string, "true" becomes True, a JSON text becomes
    the list or object it describes. What does not fit is left alone, so that the tool reports it.
    """
    if not isinstance(call.name, str) or not isinstance(call.arguments, Mapping):
        return call
    root = _parameters(domain).get(call.name, {})
    properties = root.get("properties", {})
    arguments = {name: _coerce(value, properties.get(name, {}), root) for name, value in call.arguments.items()}
    return replace(call, arguments=arguments)


@cache
def _parameters(domain: str) -> dict[str, dict[str, Any]]:
    schemas = (*agent_tools(domain, False), *user_tools(domain))
    return {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}


def _checked_fields(value: Any, record: type) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an {record.__name__} or a mapping of its fields, found {type(value).__name__}.")
    for name in value:
        if name not in record.__slots__:
            raise ValueError(f"{record.__name__} has no field {name!r}; {nearest(name, record.__slots__)}.")
    return dict(value)


def _deeper_than(depth: int, value: Any) -> bool:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return depth < 0 or any(_deeper_than(depth - 1, child) for child in children)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return kind is None or (isinstance(value, _TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean"))


def _coerce(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _coerce(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        options = [root["$defs"][o["$ref"].rpartition("/")[2]] if "$ref" in o else o for o in schema["anyOf"]]
        options = [option for option in options if _fits(value, option)] or options
        tries = [(_coerce(value, option, root), option) for option in options]
        return next((result for result, option in tries if _fits(result, option)), value)
    kind = schema.get("type")
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind == "array" and isinstance(value, list):
        return [_coerce(item, schema.get("items", {}), root) for item in value]
    if kind == "object" and isinstance(value, dict):
        properties = schema.get("properties", {})
        return {name: _coerce(item, properties.get(name, {}), root) for name, item in value.items()}
    return value
