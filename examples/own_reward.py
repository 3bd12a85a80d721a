"""Data of your own: a JSONL file of prompts and a reward function, trained by a recipe that names them.

    python examples/own_reward.py

The recipe's `env.domain` is `package.module:callable`; the callable returns a `PromptEnv` of the file and the function.
The tiny policy starts from nothing, so the reward pays for every bit of progress: to answer at all comes first.
Give `tools=[function, ...]` to let the agent call Python functions before it answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sinkflex.envs.prompts import PromptEnv
from sinkflex.recipe import load_config
from sinkflex.train import train

PROMPTS = Path(__file__).with_name("own_prompts.jsonl")
RECIPE = """
[model.tiny]
hidden = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
intermediate = 32
experts = 2
experts_per_token = 1
vocabulary = 512

[env]
domain = "own_reward:sums"

[rollout]
groups = 6
group_size = 8
slots = 48
max_turn_tokens = 64
max_tokens = 128

[learner]
learning_rate = 5e-3
checkpoint_layers = false

[train]
steps = 20
validate_every = 0
"""


def digits(answer: str, example: Mapping[str, Any]) -> dict[str, float]:
    """Pay a third for any answer, for digits alone in it, and for the right one (a key of its line in the file)."""
    share = sum(c.isdigit() for c in answer) / len(answer)
    return {"answered": 1 / 3, "digits": share / 3, "right": float(answer == example["answer"]) / 3}


def sums() -> PromptEnv:
    """Return a new environment; train and test are one file here."""
    return PromptEnv({"train": PROMPTS, "test": PROMPTS}, digits, policy="Answer with a number.", max_turns=1)


def main(*changes: str) -> None:
    """Train, and print the mean reward of the first and the last step."""
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "sums.toml"
        recipe.write_text(RECIPE, encoding="utf-8")
        run = train(load_config(recipe, [f"run.directory={folder}/run", 'log.writers=["jsonl"]', *changes]))
        lines = (run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rewards = [record["reward/mean"] for record in map(json.loads, lines) if "reward/mean" in record]
        print(f"mean reward: {rewards[0]:.2f} in step 1, {rewards[-1]:.2f} in step {run.step}")


if __name__ == "__main__":
    main("run.threads=1")
