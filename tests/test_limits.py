"""The repository's own rules: small files and functions, telling names, documents that speak of what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sinkflex.config import Config

FILE_LINES, METHOD_LINES, FUNCTION_LINES, LOOP_LINES = 400, 150, 60, 100
EMPTY_NAMES = {"utils", "helpers", "common", "base", "misc", "manager"}
# What may break a limit, with the reason: {"path" or "path:function": "why"}.
EXCEPTIONS: dict[str, str] = {}

FOLDERS = ("src", "tests", "benchmarks", "examples")
PYTHON = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))
SOURCES = [path for path in PYTHON if path.parts[0] == "src"]
DOCUMENTS = [*sorted(Path().glob("*.md")), *sorted(Path("docs").rglob("*.md"))]
# Files of a run directory, which documents speak of too.
RUN_FILES = {"config.toml"}
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short_enough_to_read_in_one_go():
    long = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").count("\n")
        limit = METHOD_LINES if path.parent.name == "methods" else FILE_LINES
        if lines > limit and str(path) not in EXCEPTIONS:
            long.append(f"{path}: {lines} lines, at most {limit}")
    assert not long


def test_functions_fit_a_screen():
    long = []
    for path in SOURCES:
        for node in functions(path):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = LOOP_LINES if (path.name, node.name) == ("train.py", "train") else FUNCTION_LINES
            if lines > limit and f"{path}:{node.name}" not in EXCEPTIONS:
                long.append(f"{path}:{node.lineno} {node.name}: {lines} lines, at most {limit}")
    assert not long


def test_names_say_what_is_inside():
    parts = {path: {part.strip("_").removesuffix(".py") for part in path.parts} for path in PYTHON}
    empty = [str(path) for path, names in parts.items() for name in names if EMPTY_NAMES & set(name.split("_"))]
    assert not empty


def test_exceptions_still_exist():
    for place, reason in EXCEPTIONS.items():
        assert Path(place.split(":")[0]).exists() and reason


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documents_name_only_files_and_modules_that_exist(document):
    gone = []
    for code in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        for name in re.findall(r"(?<![\w./<*{-])[\w-][\w./-]*\.(?:py|md|toml|lock)\b", code):
            places = (Path(name), document.parent / name, Path("src/sinkflex") / name)
            if name not in RUN_FILES and not any(place.exists() for place in places):
                gone.append(name)
        for name in re.findall(r"\bsinkflex(?:\.\w+)+", code):
            if not names_something(name.split(".")[1:]):
                gone.append(name)
    assert not gone


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documents_name_only_options_that_exist(document):
    sections = "|".join(section for section in Config.model_fields if section != "method")
    option = re.compile(rf"(?<![\w./-])(?:{sections})(?:\.[a-z_]+)+\b(?![./(])")
    keys = {
        key for code in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")) for key in option.findall(code)
    }
    known = {*Config().flat(), *(f"{section}.py" for section in Config.model_fields), "model.tiny"}
    assert not keys - known


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them."""
    titles = HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def names_something(parts: list[str]) -> bool:
    """True if the dotted name is a module of the package, or an attribute that a module defines."""
    path = Path("src/sinkflex", *parts)
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module = path.parent.with_suffix(".py")
    return module.exists() and bool(re.search(rf"\b{parts[-1]}\b", module.read_text(encoding="utf-8")))
