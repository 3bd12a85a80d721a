"""One loop, every method: the loop and the learner name none, and each has a recipe, a row and a section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sinkflex.methods.method import METHODS, Method, build_method
from sinkflex.methods.options import Options
from sinkflex.recipe import load_config

SOURCES = Path("src/sinkflex")
LOOP = [SOURCES / "train.py", *sorted((SOURCES / "learner").glob("*.py"))]


@pytest.mark.parametrize("path", LOOP, ids=str)
def test_the_loop_and_the_learner_name_no_method_in_code(path: Path) -> None:
    text = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = {name for name in METHODS if re.search(rf"[\"']{name}[\"']", text, re.IGNORECASE)}
    assert not named and not re.search(r"sinkflex\.methods\.(?!hooks|method\b)", text)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_recipe_a_row_and_a_section(name: str) -> None:
    recipe = Path("recipes") / ("telecom_cpu.toml" if name == "grpo" else f"{name}.toml")
    config = load_config(recipe)
    assert config.method.name == name
    method = build_method(name, config.method.options, config.rollout.max_tokens)
    assert isinstance(method, Method) and isinstance(method.options, Options)
    assert not method.needs_solo or (config.env.solo and config.env.domain == "telecom")
    assert f"`methods/{name}.py`" in Path("docs/methods.md").read_text(encoding="utf-8")
    assert f"methods/{name}.py" in Path("PAPERS.md").read_text(encoding="utf-8")
    assert f"({recipe})" in Path("README.md").read_text(encoding="utf-8")
