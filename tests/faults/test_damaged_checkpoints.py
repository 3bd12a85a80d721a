"""Twenty ways to damage a checkpoint: each is found, and the run goes on from the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sinkflex.checkpoint import CheckpointWarning, latest, save

FILES = ("about.json", "state.json", "tensors.safetensors", "model/model.safetensors", "SHA256SUMS")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def swell(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


DAMAGES: tuple[Callable[[Path], None], ...] = (cut, flip, swell, Path.unlink)


def written(directory: Path, step: int) -> Path:
    def model(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * step)

    state = {"optimizer": {"exp_avg": torch.full((64,), float(step))}, "tasks": list(range(step))}
    return save(directory, step, state, provenance={"seed": 0}, folders={"model": model}, keep=3).path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        last = written(tmp_path, step)
    damage(last / name)
    said = "" if name == "SHA256SUMS" else name  # damaged hashes cannot tell what they were
    with pytest.warns(CheckpointWarning, match=rf"step_3: .*{said}"):
        found = latest(tmp_path)
    assert found is not None and found.step == 2
    assert torch.equal(found.state()["optimizer"]["exp_avg"], torch.full((64,), 2.0))


def test_a_file_that_was_added_or_linked_is_found(tmp_path: Path) -> None:
    written(tmp_path, 1)
    last = written(tmp_path, 2)
    (last / "model" / "pytorch_model.bin").write_bytes(b"a pickle that nobody asked for")
    with pytest.warns(CheckpointWarning, match=r"pytorch_model\.bin"):
        assert latest(tmp_path).step == 1  # type: ignore[union-attr]


def test_hashes_that_were_made_to_fit_do_not_run_code(tmp_path: Path) -> None:
    """Whoever can write the hashes can write anything but code: nothing is unpickled."""
    path = written(tmp_path, 1)
    files = [found for found in path.rglob("*") if found.is_file()]
    assert {found.suffix for found in files} == {".json", ".safetensors", ""}
    assert json.loads((path / "state.json").read_text())["optimizer"] == {
        "exp_avg": {"$tensor": "state.optimizer.exp_avg"}
    }
