"""A method of your own: a class that overrides what its paper changes, named in the recipe by where it is.

    python examples/own_method.py

The leave-one-out baseline (RLOO, arXiv 2402.14740): an episode is compared with the mean of its siblings alone, so that
its own reward does not move the baseline it is measured against.

    A_i = R_i - 1/(G - 1) sum_{j != i} R_j
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from sinkflex.methods.method import Method
from sinkflex.recipe import load_config
from sinkflex.train import train
from sinkflex.trajectory import Group

RECIPE = Path(__file__).parent.parent / "recipes" / "smoke.toml"


class LeaveOneOut(Method):
    """GRPO with another baseline and no division by the standard deviation."""

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens."""
        rewards = np.array([t.reward for t in group.valid], np.float64)
        others = max(len(rewards) - 1, 1)
        baselines = (rewards.sum() - rewards) / others if len(rewards) > 1 else rewards
        pairs = zip(group.valid, rewards - baselines, strict=True)
        return [np.full(t.sampled_tokens, a, np.float32) for t, a in pairs]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        changes = [
            "method.name=own_method:LeaveOneOut",  # `package.module:Class`, found as an import would find it
            f"run.directory={folder}/run",
            "run.threads=1",
            "warmup.steps=2",
            "train.steps=1",
            "env.max_turns=4",
            'log.writers=["jsonl"]',
        ]
        run = train(load_config(RECIPE, changes))
        print(type(run.method).__name__, "after step", run.step)
        record = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
        print({name: round(value, 3) for name, value in record.items() if name.startswith("reward/")})
