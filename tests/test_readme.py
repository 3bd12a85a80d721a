"""Every command in the documents is one that exists, with options that exist; the slow tests run them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from sinkflex.cli import app
from sinkflex.recipe import load_config

DOCUMENTS = [*sorted(Path().glob("*.md")), *sorted(Path("docs").rglob("*.md"))]
RECIPES = sorted(Path("recipes").glob("*.toml"))


def is_tiny(recipe: Path) -> bool:
    """True if the recipe builds its own model, and needs no download."""
    return tomllib.loads(recipe.read_text("utf-8")).get("model", {}).get("path", "tiny") == "tiny"


def commands(text: str) -> list[str]:
    """Return the lines of all bash blocks, continued lines joined, comments and prompts removed."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def runnable(document: Path) -> bool:
    """True if the document shows commands beyond make."""
    return any(line.split()[0] in ("sinkflex", "python") for line in commands(document.read_text(encoding="utf-8")))


def parse(arguments: list[str]) -> None:
    """Let the command line parse these arguments without running anything; raises on a mistake."""
    group = typer.main.get_command(app)
    while hasattr(group, "resolve_command"):
        context = group.make_context("sinkflex", list(arguments), resilient_parsing=False)
        _, group, arguments = group.resolve_command(context, [*context._protected_args, *context.args])
    values = group.make_context("sinkflex", list(arguments)).params
    if values.get("recipe"):
        load_config(values["recipe"], values["overrides"] or ())


def check(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "sinkflex":
        parse(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), line
    elif words[0] == "python":
        assert Path(words[1]).exists(), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_in_documents_parse(document):
    for line in commands(document.read_text(encoding="utf-8")):
        check(line)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_command_hardware_and_result(recipe):
    header = re.match(r"(#.*\n)+", recipe.read_text(encoding="utf-8"))
    assert header
    assert f"sinkflex train {recipe}" in header[0]
    assert "Hardware:" in header[0] and "measured" in header[0].lower()


@pytest.mark.parametrize(
    "line",
    [
        "sinkflex trian recipes/smoke.toml",
        "sinkflex train recipes/smoke.toml --sett x=1",
        "sinkflex train recipes/no.toml",
    ],
)
def test_a_wrong_command_would_be_found(line):
    with pytest.raises(Exception, match=r"(?i)no such"):
        check(line)
    with pytest.raises(AssertionError):
        check("make everything")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if runnable(path)], ids=str)
def test_commands_in_documents_run(document, tmp_path):
    """Runs the commands of a document one after the other, training for two steps; of benchmarks it asks the help."""
    for folder in ("recipes", "examples", "benchmarks"):
        if Path(folder).exists():
            shutil.copytree(folder, tmp_path / folder)
    short = ["--set", "train.steps=2", "--set", "warmup.steps=2", "--set", "rollout.groups=2"]
    for line in commands(document.read_text(encoding="utf-8")):
        words = shlex.split(line)
        if words[0] == "sinkflex":
            program = [sys.executable, "-c", "from sinkflex.cli import main; main()", *words[1:]]
            program += short if any(word.startswith("recipes/") for word in words) else []
        elif words[0] == "python":
            # Comparisons take hours: their tests run them small.
            program = [sys.executable, *words[1:], *(["--help"] if words[1].startswith("benchmarks/") else [])]
        else:
            continue
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", [path for path in RECIPES if is_tiny(path)], ids=lambda path: path.stem)
def test_shipped_recipes_run(recipe, tmp_path):
    program = [sys.executable, "-c", "from sinkflex.cli import main; main()", "train", str(recipe)]
    program += ["--set", f"run.directory={tmp_path}", "--set", "train.steps=2", "--set", "warmup.steps=2"]
    program += ["--set", "validation.extra=[]"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
