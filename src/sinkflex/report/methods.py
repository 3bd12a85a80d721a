"""The methods, and what each changes in the options of GRPO: `sinkflex methods`."""

from __future__ import annotations

import json
import sys
from typing import Any

from sinkflex.methods.method import METHODS, Method, build_method

_PLAIN = "grpo"


def methods_report(name: str | None = None) -> list[dict[str, Any]]:
    """Return a record for each method, or for one: paper, recipe, options, and those that plain GRPO has otherwise.

    Args:
        name: a key of METHODS, or `package.module:Class`; all of METHODS if left out.

    Raises:
        ValueError: there is no such method.
    """
    plain = _options(build_method(_PLAIN, {}, max_tokens=1))
    rows = []
    for key in METHODS if name is None else [name]:
        method = build_method(key, {}, max_tokens=1)
        options = _options(method)
        rows.append(
            {
                "method": key,
                "paper": _about(method).splitlines()[0] if _about(method) else "",
                "recipe": f"recipes/{'telecom_cpu' if key == _PLAIN else key}.toml" if key in METHODS else "",
                "options": options,
                "differs": {k: v for k, v in options.items() if k not in plain or plain[k] != v},
            }
        )
    return rows


def methods_text() -> str:
    """Return a line for each method, and what to type for more."""
    rows = methods_report()
    width = max(len(row["method"]) for row in rows)
    lines = [f"{row['method']:{width}}  {row['paper']}" for row in rows]
    return "\n".join([*lines, "", "Type sinkflex methods NAME for options and how they differ from GRPO's."])


def method_text(name: str) -> str:
    """Return what a method is, and its options with their meaning: first its own, then those it shares with GRPO."""
    (row,) = methods_report(name)
    method, plain = build_method(name, {}, max_tokens=1), build_method(_PLAIN, {}, max_tokens=1)
    lines = [_about(method), ""]
    if row["recipe"]:
        lines += [f"Recipe: {row['recipe']}", ""]
    shared = {key: value for key, value in row["options"].items() if key not in row["differs"]}
    for title, options in ((f"Options that differ from {_PLAIN}'s", row["differs"]), ("Options as there", shared)):
        if options and name != _PLAIN:
            lines.append(f"{title}:")
        for key, value in options.items():
            was = getattr(plain.options, key, value)
            other = f" (there {json.dumps(was)})" if was != value else ""
            meaning = (type(method.options).model_fields[key].description or "").replace("\n", " ")
            lines.append(f"  method.{key} = {json.dumps(value)}{other}  {meaning}")
    return "\n".join(lines)


def _options(method: Method) -> dict[str, Any]:
    return method.options.model_dump(mode="json")


def _about(method: Method) -> str:
    return (sys.modules[type(method).__module__].__doc__ or "").strip()
