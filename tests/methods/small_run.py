"""A run of two steps on telecom in solo, for tests that see a method train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sinkflex.config import Config
from sinkflex.recipe import load_config

SMOKE = Path(__file__).parent.parent.parent / "recipes" / "smoke.toml"
SMALL = (
    "run.threads=1",
    "env.solo=true",
    "env.max_turns=4",
    "warmup.steps=3",
    "train.steps=2",
    "rollout.slots=8",
    "validation.split=test",
    'log.writers=["jsonl"]',
)


def small(directory: Path, method: str, *overrides: str) -> Config:
    return load_config(SMOKE, [*SMALL, f"run.directory={directory}", f"method.name={method}", *overrides])


def records(directory: Path) -> list[dict[str, Any]]:
    """What was logged of the steps, in order."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "train" and line["step"] > 0]
