from __future__ import annotations

import re
from pathlib import Path

from sinkflex.config import TinyConfig
from sinkflex.policy.tiny import build_model
from sinkflex.recipe import load_config
from sinkflex.report.profile import profile_of, weights_met
from sinkflex.train import train
from tests.methods.small_run import SMALL

SMOKE = Path(__file__).parents[2] / "recipes" / "smoke.toml"


def test_the_parts_of_a_step_add_up_and_none_is_negative(tmp_path: Path) -> None:
    run = train(load_config(SMOKE, [*SMALL, f"run.directory={tmp_path}", "train.steps=2"]))
    text = profile_of(run)
    seconds = {name.strip(): float(value) for name, value in re.findall(r"^([a-z, ]+?) +(\d+\.\d{3})", text, re.M)}
    assert list(seconds) == ["environment", "prefill", "decode", "score", "update", "idle, writing", "step"]
    whole = seconds.pop("step")
    assert all(value >= 0 for value in seconds.values())
    assert abs(sum(seconds.values()) - whole) < 0.01
    assert "mean of 2 steps" in text and "of peak" in text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    run = train(load_config(SMOKE, [*SMALL, f"run.directory={tmp_path}", "train.steps=0"]))
    assert "raise train.steps" in profile_of(run)


def test_a_token_meets_the_experts_it_is_sent_to_and_no_embedding() -> None:
    shape = TinyConfig(
        hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=4, experts=4, experts_per_token=1
    )
    body, head = weights_met(build_model(shape, 600, 0))
    attention = 16 * (16 + 8 + 8) + 16 * 16
    router, expert = 4 * 16, 16 * 8 + 4 * 16
    biases = 8 + 16  # of an expert, kept as matrices
    assert body == attention + router + expert + biases
    assert head == 600 * 16
