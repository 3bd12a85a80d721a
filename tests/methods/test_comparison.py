"""The comparison of methods: every arm is a recipe that loads, and every method is in it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from sinkflex.methods.method import METHODS, build_method
from sinkflex.recipe import load_config

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """Load a script of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comparison, semi_online, direct_opd = (script(name) for name in ("methods", "semi_online", "direct_opd"))
seeds = script("seeds")


@pytest.mark.parametrize(("arm", "mode"), comparison.pairs(list(comparison.ARMS), list(comparison.MODES)))
def test_every_arm_is_a_recipe_with_the_episodes_of_grpo(arm: str, mode: str) -> None:
    config = load_config(comparison.RECIPE, comparison.changes(arm, mode, 0, []))
    plain = load_config(comparison.RECIPE, comparison.fixed(mode, 0, []))
    build_method(config.method.name, config.method.options, config.rollout.max_tokens)
    for section in ("model", "env", "rollout", "learner", "train", "validation", "warmup"):
        same = getattr(config, section) == getattr(plain, section)
        assert same or (arm, section, config.train.steps) == ("start", "train", 0)


def test_by_default_every_method_runs_beside_grpo_and_the_control() -> None:
    ran = comparison.pairs(None, list(comparison.MODES))
    names = {load_config(comparison.RECIPE, list(comparison.ARMS[arm])).method.name for arm, _ in ran}
    assert names == set(METHODS) - {"direct_opd"}, "that one needs a pair of models: benchmarks/direct_opd.py"
    assert {("grpo", m) for m in comparison.MODES} | {("shuffled", m) for m in comparison.MODES} <= set(ran)
    assert not any(mode == "dual" and arm in comparison.SOLO_ONLY for arm, mode in ran)


def test_a_table_pairs_each_arm_with_grpo_of_its_seed_and_says_when_it_got_there() -> None:
    def row(arm: str, seed: int, held_out: float, curve: list[list[float]]) -> dict[str, object]:
        about = {"floors": {"do_nothing": 0.0}, "about": "scripted user", "episodes_a_step": 48}
        return {
            "arm": arm,
            "mode": "dual",
            "seed": seed,
            "held_out": held_out,
            "interval": [0.1, 0.9],
            "curve": curve,
            **about,
        }

    rows = [row("grpo", s, 0.4 + s / 10, [[0, 0.3], [4, 0.4], [8, 0.5]]) for s in (0, 1)]
    rows += [row("dtac", s, 0.5 + s / 10, [[0, 0.3], [4, 0.5], [8, 0.4]]) for s in (0, 1)]
    rows += [row("gspo", 0, 0.3, [[0, 0.3], [8, 0.4]])]
    text = comparison.table(rows)
    assert "| dual | dtac | 2 | 0.550 (0.500 to 0.600) | +0.100 (+0.100 to +0.100) | 192, 192 |" in text
    assert "| dual | gspo | 1 | 0.300 (0.100 to 0.900) | -0.100 | never |" in text


def test_the_results_are_those_of_the_recorded_rows() -> None:
    docs = SCRIPTS.parent / "docs"
    rows = [json.loads(line) for line in (docs / "methods.jsonl").read_text("utf-8").splitlines()]
    assert comparison.table(rows) in (docs / "results.md").read_text("utf-8")
    assert len({(row["arm"], row["mode"], row["seed"]) for row in rows}) == len(rows)
    for name in ("direct_opd", "direct_opd_ahead"):
        pairs = [json.loads(line) for line in (docs / f"{name}.jsonl").read_text("utf-8").splitlines()]
        assert direct_opd.table(pairs) in (docs / "results.md").read_text("utf-8")
    retail = [json.loads(line) for line in (docs / "retail_cpu.jsonl").read_text("utf-8").splitlines()]
    assert seeds.table(retail) in (docs / "results.md").read_text("utf-8")
    assert {tuple(row["floors"].items()) for row in rows if row["mode"] == "dual"} == {tuple(rows[0]["floors"].items())}


def test_what_the_documents_say_of_each_method_is_in_the_table() -> None:
    docs = SCRIPTS.parent / "docs"
    results = (docs / "results.md").read_text("utf-8")
    said = re.findall(r"`(\w+)` in (dual|solo) ([+-].*? to .*?\))", (docs / "methods.md").read_text("utf-8"))
    assert {"gspo", "stepo", "dtac", "tara", "empo", "river", "seed", "pats", "toolsrl"} <= {arm for arm, _, _ in said}
    for arm, mode, gain in said:
        assert re.search(rf"\| {mode} \| {arm} \| 5 \| [^|]* \| {re.escape(gain)} \|", results), (arm, mode, gain)


def test_a_score_is_compared_with_the_real_reward_over_eight_checkpoints_at_least() -> None:
    rows = [
        {"checkpoint": f"run/step_{i}", "PG": i / 8, "TSR": 0.5, "Score": i / 9, "Step": 1 - i / 8, "real": i / 8}
        | {"floors": {"do_nothing": 0.0}, "about": "solo, no user"}
        for i in range(8)
    ]
    assert "too few" in semi_online.table(rows[:7]) and "Spearman" not in semi_online.table(rows[:7])
    text = semi_online.table(rows)
    assert "| PG | 8 | 1.000 | 1.000 | 1.000 to 1.000 |" in text and "| Step | 8 | 1.000 | -1.000 |" in text
    assert "| TSR | 8 | nan | nan |" in text, "a score that never changes tells nothing"
