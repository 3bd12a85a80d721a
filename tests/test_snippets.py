"""The Python blocks of the documents run, and print what they say.

All ```python blocks of a document run in order, in one namespace and an empty folder. A line `print(...)  # text` must
print that text. A block that cannot run carries another tag, for instance ```text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENTS = [*sorted(Path().glob("*.md")), *sorted(Path("docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SAID = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Return the Python blocks, each after as many empty lines as it has lines before it, for tracebacks."""
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in BLOCK.finditer(text)]


def run(text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__snippet__"}
    for block in blocks(text):
        exec(compile(block, name, "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
        assert printed == SAID.findall(block) or not SAID.search(block), name


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if blocks(path.read_text("utf-8"))], ids=str)
def test_python_blocks_run_and_print_what_they_say(
    document: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = document.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run(text, str(document), capsys)


@pytest.mark.parametrize(
    "block", ["```python\nprint(1 + 1)  # 3\n```", "```python\nimport no_such_module\n```", "```python\n1 +\n```"]
)
def test_a_wrong_block_is_found(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, ImportError, SyntaxError)):
        run(block, "a document", capsys)


def test_a_block_without_python_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run("```text\nnot code\n```", "a document", capsys)
