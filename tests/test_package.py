"""What a source distribution holds."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest


def test_a_source_distribution_has_all_that_its_tests_and_documents_use(tmp_path: Path) -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist")
    archive = next(sdist.SdistBuilder(str(Path.cwd())).build(directory=str(tmp_path)))
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    folders = ("src", "tests", "docs", "examples", "recipes", "benchmarks")
    wanted = [path for folder in folders for path in Path(folder).rglob("*") if path.suffix in (".py", ".md", ".toml")]
    wanted += [
        *Path().glob("*.md"),
        Path("Makefile"),
        Path("pyproject.toml"),
        Path("requirements.lock"),
        Path("LICENSE"),
    ]
    assert len(wanted) > 100
    assert sorted(str(path) for path in wanted if str(path) not in packed) == []
