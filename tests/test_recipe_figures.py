"""The scores in the headers of recipes are those on record."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
RESULTS = (ROOT / "docs" / "results.md").read_text("utf-8")
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SCORE = re.compile(r"(?<![\d.])[01]\.\d+")


def claimed(recipe: Path) -> list[str]:
    """Return the scores that a header says were measured."""
    header = "".join(line for line in recipe.read_text("utf-8").splitlines(True) if line.startswith("#"))
    return SCORE.findall(header.partition("Measured")[2])


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "docs" / name).read_text("utf-8").splitlines()]


def cells(row: str) -> list[float]:
    """Return the first number of each cell of a row of the results that has one."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)", RESULTS, re.MULTILINE)
    return [float(cell.split()[0]) for cell in line.split("|") if re.match(r" \d", cell)]


def recorded(recipe: str) -> Sequence[float]:
    """Return the scores on record, in the order in which the header tells them."""
    if recipe == "bench":
        score = {(row["arm"], row["mode"], row["seed"]): row["held_out"] for row in rows("methods.jsonl")}
        return score["start", "dual", 0], score["grpo", "dual", 0]
    if recipe == "telecom_cpu":
        return cells("40 test tasks, greedy, 3 seeds")
    if recipe == "empo":
        floors = re.search(r"## EMPO's score\n.*?floors (\S+) \(do-nothing\) and (\S+)", RESULTS, re.DOTALL)
        assert floors is not None
        return cells("empo/step_0")[-1], cells("empo/step_30")[-1], *map(float, floors.groups())
    assert recipe == "direct_opd"
    of = {arm: [row for row in rows("direct_opd.jsonl") if row["arm"] == arm] for arm in ("direct", "grpo")}
    means = [np.mean([row[name] for row in of["direct"]]) for name in ("weak_start", "weak_end", "start", "end")]
    ends = [row["end"] for row in of["grpo"]]
    return [float(value) for value in (*means, np.mean(ends), min(ends), max(ends))]


@pytest.mark.parametrize("recipe", ["bench", "telecom_cpu", "empo", "direct_opd"])
def test_the_scores_of_a_recipe_are_its_record(recipe: str) -> None:
    said, found = claimed(ROOT / "recipes" / f"{recipe}.toml"), recorded(recipe)
    assert len(said) == len(found) and said == [
        f"{value:.{len(text) - 2}f}" for value, text in zip(found, said, strict=True)
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_claims_a_score_that_the_results_do_not_have(recipe: Path) -> None:
    known = [float(text) for text in SCORE.findall(RESULTS)]
    for text in claimed(recipe):
        assert any(f"{value:.{len(text) - 2}f}" == text for value in known), text
