"""The retail recipes: the small one runs; the large one is valid, and trains as written on a model of its shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sinkflex.build import make_env
from sinkflex.config import Config
from sinkflex.demonstrations import demonstrations, expert, played
from sinkflex.recipe import load_config
from sinkflex.tasks.suites import training_tasks
from sinkflex.train import train

RECIPES = Path(__file__).parent.parent / "recipes"
# As little as keeps every stage: one short episode for each test task, two for a training task.
SHORT = [
    "warmup.steps=1",
    "warmup.demonstrations=1",
    "warmup.repeats=2",
    "warmup.batch_tokens=500",
    "env.max_turns=1",
    "rollout.groups=1",
    "rollout.group_size=2",
    "rollout.max_turn_tokens=4",
    "learner.mini_batches=1",
    "train.steps=2",
    "train.validate_every=0",
    'tasks.exclude=["instr_env_mismatch"]',
]
TINY = ["model.tiny.hidden=32", "model.tiny.layers=2", "model.tiny.vocabulary=1024"]


@pytest.fixture(autouse=True)
def _determinism_of_torch_is_put_back():
    yield
    torch.use_deterministic_algorithms(False)


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_cpu_recipe_runs_from_warm_start_to_validation(tmp_path):
    config = load_config(RECIPES / "retail_cpu.toml", [*SHORT, *TINY, f"run.directory={tmp_path}"])
    assert train(config).step == 2
    assert [record["step"] for record in records(tmp_path) if "validation/mean@1" in record] == [0, 2]


def test_the_cpu_recipe_leaves_out_what_the_audit_finds():
    config = load_config(RECIPES / "retail_cpu.toml")
    whole = training_tasks("retail", "train")
    kept = training_tasks("retail", "train", [v for v in config.tasks.exclude if v != "task_trivial"])
    assert len(whole) - len(kept) == 12 and {"2", "3", "4", "105"}.isdisjoint(task.task_id for task in kept)


def test_demonstrations_of_retail_fit_into_the_recipe_and_are_often_paid():
    config = load_config(RECIPES / "retail_cpu.toml", ["warmup.demonstrations=20", "warmup.repeats=3"])
    episodes = demonstrations(config)
    assert sum(dialogue.reward for dialogue in episodes[:20]) >= 6
    practiced = episodes[20:]
    assert 30 < len(practiced) <= 40 and all(dialogue.reward == 1.0 for dialogue in practiced)
    played.cache_clear()
    assert [dialogue.exchanges for dialogue in demonstrations(config)] == [dialogue.exchanges for dialogue in episodes]
    assert max(len(dialogue.exchanges) for dialogue in episodes) <= config.env.max_turns


@pytest.mark.parametrize("options", [["env.domain=airline"], ["env.domain=retail", "env.solo=true"]])
def test_a_domain_without_an_expert_says_so(options):
    with pytest.raises(ValueError, match=r"no scripted expert for .*; use --set warmup.steps=0"):
        expert(load_config(RECIPES / "retail_cpu.toml", [*options, "tasks.exclude=[]"]))


def gpt_oss(*overrides: str) -> Config:
    return load_config(RECIPES / "retail_gpt_oss.toml", overrides)


def test_the_gpu_recipe_is_the_papers_setting():
    config = gpt_oss()
    assert (config.env.domain, config.tasks.split, config.validation.split) == ("retail", "train", "test")
    assert (config.prompt.policy_text, config.prompt.tools, config.rollout.group_size) == ("full", "full", 8)
    assert config.method.name == "grpo" and make_env(config).policy.startswith("# Retail agent policy")


def test_the_gpu_recipe_runs_on_a_random_model_of_the_same_shape(tmp_path):
    small = [
        "run.device=cpu",
        "model.path=tiny",
        "model.tiny.max_tokens=16384",
        f"run.directory={tmp_path}",
        "prompt.policy_text=none",
        "prompt.tools=compact",
    ]
    config = gpt_oss(*[option for option in SHORT if not option.startswith("warmup.")], *TINY, *small)
    assert train(config).step == 2
    assert "validation/mean@1" in records(tmp_path)[-1]
