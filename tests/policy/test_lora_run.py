"""A run that trains adapters: it is checked, stopped, continued, scored and merged like any other."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sinkflex.check import CHECKS
from sinkflex.checks.subject import open_subject
from sinkflex.config import Config
from sinkflex.demonstrations import corpus
from sinkflex.evaluate import open_policy
from sinkflex.policy.model import new_policy
from sinkflex.report.export import export
from sinkflex.run import open_run
from sinkflex.train import train
from tests.methods.small_run import records, small

TRAINED = (
    "model.lora.rank=2",
    "method.entropy_coefficient=0.1",
    "method.kl_coefficient=0.1",
    "learner.learning_rate=1e-2",
    "rollout.group_size=2",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = small(folder, "grpo")
    new_policy(config, lambda: corpus(config)).save(folder)
    return folder


def config(base: Path, directory: Path, *overrides: str) -> Config:
    return small(directory, "grpo", f"model.path={base}", *TRAINED, *overrides)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "whole"
    train(config(base, directory))
    return directory


def test_a_run_stopped_and_continued_leaves_equal_adapters(base: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config(base, tmp_path), interrupted=lambda: True)
    assert not (tmp_path / "checkpoints" / "step_2").exists()
    train(config(base, tmp_path))
    names = [f"checkpoints/step_2/model/adapter_{name}" for name in ("config.json", "model.safetensors")]
    names += ["checkpoints/step_2/tensors.safetensors", "trajectories/step_2.jsonl.zst", "metrics.jsonl"]
    assert filecmp.cmpfiles(whole, tmp_path, names, shallow=False) == (names, [], [])
    assert not filecmp.cmp(whole / names[1], whole / names[1].replace("step_2", "step_0"), shallow=False), "it moved"
    assert not (whole / "checkpoints/step_2/model/model.safetensors").exists()


def test_the_reference_is_the_adapter_before_training(whole: Path) -> None:
    kl = [record["learner/kl"] for record in records(whole)]
    assert abs(kl[0]) < 1e-6 < kl[1], "of the first update it is the policy itself"
    assert all(record["learner/log_ratio_abs_max"] < 1e-3 for record in records(whole))


def test_the_merged_policy_is_an_ordinary_folder_that_says_the_same(whole: Path, base: Path, tmp_path: Path) -> None:
    result = export(whole, "model", tmp_path / "merged")
    assert result["merged_rank"] == 2 and result["source"].endswith("step_2")
    adapted, _ = open_policy(config(base, whole), whole / "checkpoints/step_2/model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (adapted.model, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"is there already: name a new folder"):
        export(whole, "model", tmp_path / "merged")


def test_options_that_a_checkpoint_cannot_follow_are_refused(whole: Path, base: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.rank is 0, but .* adapter of rank 2\. Type model\.lora\.rank"):
        open_run(config(base, whole, "model.lora.rank=0"))


def test_every_check_passes_and_sinks_are_live_though_frozen(base: Path, tmp_path: Path) -> None:
    subject = open_subject(config(base, tmp_path), tmp_path)
    with subject.run:
        found = {name: prove(subject) for name, prove in CHECKS.items()}
    assert "live in 2 layers, frozen" in found["sinks live and learn"]
