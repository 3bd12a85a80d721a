"""A run of two steps on the mock domain, from random weights, for tests that see a method train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from sinkflex.config import Config
from sinkflex.learner.scorer import Scorer
from sinkflex.methods.hooks import Services
from sinkflex.recipe import load_config

SMOKE = Path(__file__).parent.parent.parent / "recipes" / "smoke.toml"
SMALL = (
    "run.threads=1",
    "env.domain=mock",
    "env.max_turns=3",
    "tasks.split=base",
    "warmup.steps=0",
    "train.steps=2",
    "rollout.slots=9",
    "rollout.max_turn_tokens=10",
    "validation.split=base",
    'log.writers=["jsonl"]',
)


def small(directory: Path, method: str, *overrides: str) -> Config:
    return load_config(SMOKE, [*SMALL, f"run.directory={directory}", f"method.name={method}", *overrides])


def services(scorer: Scorer | None = None, step: int = 1, directory: Path = Path()) -> Services:
    """What a method is handed after a step; most ask for no model."""
    return Services(step, directory, cast(Scorer, scorer))


def records(directory: Path) -> list[dict[str, Any]]:
    """What was logged of the steps, in order."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "train" and line["step"] > 0]
