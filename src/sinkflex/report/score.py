"""The text of a score, as `sinkflex evaluate` and `sinkflex rollout` print it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_TABLES = {"by_family": "family", "by_part": "part of the reward", "by_stop_reason": "stop reason"}


def score_text(result: Mapping[str, Any]) -> str:
    """Return the result of `evaluate.evaluate` or `evaluate.roll_out_training_tasks` as lines and tables."""
    lines = _score_lines(result)
    if "comparison" in result:
        lines += ["", f"against: {result['against']['policy']}", *_score_lines(result["against"])[1:], ""]
        lines += _comparison_lines(result["comparison"])
    return "\n".join(lines)


def _score_lines(result: Mapping[str, Any]) -> list[str]:
    temperature = _number(result["temperature"])
    if "sampling" in result:
        temperature += f" ({result['sampling']})"
    lines = [
        f"policy: {result['policy']}",
        *(f"{name}: {result[name]}" for name in ("checkpoint", "file") if name in result),
        f"suite: {result['suite']}, split {result['split']}: {result['tasks']} tasks, {result['trials']} trials",
        f"temperature: {temperature}",
        f"about: {result['about']}",
    ]
    if "sealed" in result:
        lines.append("sealed: " + ", ".join(f"{key} {value}" for key, value in result["sealed"].items()))
    lines.append(f"mean@1: {_number(result['mean@1'])}")
    if result["interval"] is not None:
        lines.append(f"95% interval: {_range(result['interval'])} (bootstrap), {_range(result['wilson'])} (Wilson)")
    if "floors" in result:
        user = "" if re.match(r"solo|environment ", result["about"]) else " (scripted user)"
        lines.append(f"floors: {_pairs(result['floors'])}{user}")
    if len(result["pass^k"]) > 1:
        lines += [f"{name}: {_pairs(result[name])}" for name in ("pass^k", "pass@k")]
    if result["turns"] is not None:
        lines.append(f"turns: {_number(result['turns'])}")
    lines += [f"invalid, counted nowhere: {count} times: {cause}" for cause, count in result["invalid"].items()]
    if result["unscored"]:
        lines.append(f"tasks without a valid episode: {', '.join(result['unscored'])}")
    for name, title in _TABLES.items():
        if result[name]:
            lines += ["", _table([{title: key, **row} for key, row in result[name].items()])]
    if "per_task" in result:
        lines += ["", _table(result["per_task"])]
    return lines


def _comparison_lines(comparison: Mapping[str, Any]) -> list[str]:
    lines = [
        f"difference: {comparison['difference']:+.4g} over {comparison['tasks']} tasks, "
        f"95% interval {_range(comparison['interval'])} (paired bootstrap)",
        f"tasks: {comparison['better']} better, {comparison['worse']} worse, {comparison['equal']} equal; "
        f"p = {_number(comparison['p_value'])} (McNemar, exact)",
    ]
    if comparison["unpaired"]:
        lines.append(f"left out, scored on one side only: {', '.join(comparison['unpaired'])}")
    if "caution" in comparison:
        lines.append(f"caution: {comparison['caution']}")
    return lines


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    table = Table(*rows[0], box=None, header_style="", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_range(value) if isinstance(value, list) else _number(value)) for value in row.values()))
    text = io.StringIO()
    Console(file=text, width=10_000).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _pairs(values: Mapping[Any, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _range(interval: Sequence[float]) -> str:
    return f"{_number(interval[0])} to {_number(interval[1])}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
