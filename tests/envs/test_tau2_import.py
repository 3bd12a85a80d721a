"""tau2 is imported quietly, whoever asks for it first."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path("src/sinkflex")


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.partition(".")[0] for name in names}


def test_only_the_folder_that_silences_tau2_imports_it():
    users = [path for path in SOURCE.rglob("*.py") if "tau2" in imported(path)]
    assert users and {path.parent for path in users} == {SOURCE / "envs" / "tau2"}


@pytest.mark.parametrize("module", ["provenance", "users.endpoint", "tasks.gold"])
def test_a_folder_without_an_env_file_is_no_reason_for_a_warning(module, tmp_path):
    program = f"import sys, sinkflex.{module}\nassert 'tau2.utils' in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
