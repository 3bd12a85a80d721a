"""Where a policy lives, and what is no policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sinkflex.config import Config, RunConfig
from sinkflex.policy.model import device_of, load_policy
from tests.policy.tiny_policy import tiny_policy


def test_auto_takes_only_a_gpu_that_has_kernels_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for there, expected in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert device_of(RunConfig()).type == expected
    assert device_of(RunConfig(device="cpu")).type == "cpu"


def test_a_gpu_that_is_not_there_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"run\.device=auto"):
        device_of(RunConfig(device="cuda"))


def without_sinks(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "sinks" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def configured(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def halved(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        without_sinks,
        halved,
        configured(hidden_size=64),
        configured(num_hidden_layers=4, layer_types=None),
        configured(model_type="unheard_of"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "config.json").write_text('{"a":'),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    ],
)
def test_a_damaged_model_folder_is_a_users_mistake(damage: Callable[[Path], object], tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    load_policy(Config(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path: .*(cannot be loaded|lacks weights)"):
        load_policy(Config(), tmp_path)
