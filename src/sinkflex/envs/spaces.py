"""Gymnasium spaces of messages and actions: they sample, contain, compare and pickle like any other space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import Space

from sinkflex.envs.env import Action, Message, ToolCall

_ROLES = ("system", "user", "assistant", "tool")
_WORDS = ("yes", "no", "please", "check", "my", "phone", "order", "#W0000000", "C1001", "2.0", "")


class MessageSpace(Space[tuple[Message, ...]]):
    """Tuples of messages, the empty one included."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages have no array form."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> tuple[Message, ...]:
        """Return up to two random messages."""
        rng = self.np_random
        return tuple(Message(str(rng.choice(_ROLES)), _text(rng)) for _ in range(rng.integers(3)))

    def contains(self, x: Any) -> bool:
        """True for a tuple of messages with a known role and a text."""
        return isinstance(x, tuple) and all(
            isinstance(item, Message) and item.role in _ROLES and isinstance(item.content, str) for item in x
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace)

    def __repr__(self) -> str:
        return "MessageSpace()"


class ActionSpace(Space[Action]):
    """Texts, calls of the given tools, and parse errors.

    Args:
        tools: OpenAI function schemas; samples call them with arguments of the right types.
        seed: seed of `sample`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), seed: int | None = None) -> None:
        super().__init__(None, None, seed)
        self.tools = tuple(tools)

    @property
    def is_np_flattenable(self) -> bool:
        """Actions have no array form."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> Action:
        """Return a random action: mostly one to three calls or a text, sometimes a parse error."""
        rng = self.np_random
        kind = rng.random()
        if kind < 0.1:
            return Action(error="unfinished call")
        if kind < 0.4 or not self.tools:
            return Action(text=_text(rng) or "ok")
        picked = [self.tools[rng.integers(len(self.tools))]["function"] for _ in range(rng.integers(1, 4))]
        return Action(
            tool_calls=tuple(
                ToolCall(tool["name"], _value(rng, tool["parameters"], tool["parameters"]), f"call_{i}")
                for i, tool in enumerate(picked)
            )
        )

    def contains(self, x: Any) -> bool:
        """True for an action that says, calls or reports something."""
        return isinstance(x, Action) and bool(x.text or x.tool_calls or x.error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and self.tools == other.tools

    def __repr__(self) -> str:
        return f"ActionSpace({', '.join(tool['function']['name'] for tool in self.tools)})"


def _text(rng: Any) -> str:
    return " ".join(rng.choice(_WORDS, size=rng.integers(6)))


def _value(rng: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _value(rng, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return _value(rng, schema["anyOf"][rng.integers(len(schema["anyOf"]))], root)
    if "enum" in schema:
        return schema["enum"][rng.integers(len(schema["enum"]))]
    match schema.get("type"):
        case "object":
            return {name: _value(rng, item, root) for name, item in schema.get("properties", {}).items()}
        case "array":
            return [_value(rng, schema.get("items", {}), root) for _ in range(rng.integers(3))]
        case "integer":
            return int(rng.integers(5))
        case "number":
            return float(rng.integers(5))
        case "boolean":
            return bool(rng.integers(2))
        case "null":
            return None
    return _text(rng)
