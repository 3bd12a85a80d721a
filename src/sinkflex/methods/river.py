"""River: a penalty for turns that repeat themselves, beside GRPO (arXiv 2608.22631).

    rep(t) = 1 if an earlier turn u has J(command t, command u) > 0.8 and J(output t, output u) > 0.8
    A[i, t] = A_i - penalty * rep(t), at most penalty_cap an episode, added after normalization

J is the Jaccard similarity of two sets. Both must repeat, so that looking again at something that has changed is free.
The penalty also acts in groups without reward variance, where A_i is 0, and the sum of a group falls below 0: both
are consequences of adding it after normalization. Such groups count in the loss denominators.
An episode alone in its group is not trained on: nobody says what the group does otherwise.

What we changed: what J compares is not stated; here it is lower-case words, or 3-grams of characters. Two empty texts
are equal. The paper's other half, filtering environments whose checker is wrong, is `sinkflex tasks audit` with
`tasks.exclude`.
When it fails: where a repetition is right, as waiting is. It adds nothing where the policy does not loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sinkflex.behavior import BEHAVIORS, repeated, report
from sinkflex.methods.credit import spread
from sinkflex.methods.hooks import Services
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.metrics import register
from sinkflex.trajectory import Group, Trajectory

register("behavior/*/mean", "fraction", "how often the valid episodes of the step behave so, see `behavior.py`")
register("behavior/*/auc", "AUC", "chance that a solved episode has more of it than another one")


class RiverOptions(Options):
    """River's options."""

    penalty: float = Field(0.05, ge=0)
    """What a turn that repeats an earlier one costs (delta)."""
    penalty_cap: float = Field(0.15, ge=0)
    """Most that the turns of one episode cost together."""
    threshold: float = Field(0.8, ge=0, le=1)
    """Two texts are alike if their similarity is above."""
    compared: Literal["words", "grams"] = "words"
    """What the similarity compares: lower-case words, or 3-grams of characters."""


class River(Method):
    """GRPO with a penalty for loops."""

    Options = RiverOptions
    options: RiverOptions

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens; 0 for one that is alone."""
        if len(group.valid) < 2:
            return super().advantages(group)
        pairs = zip(group.valid, super().advantages(group), strict=True)
        return [advantages - spread(t, self.penalties(t)) for t, advantages in pairs]

    def penalties(self, trajectory: Trajectory) -> np.ndarray:
        """Return what each turn [K] costs; the first ones pay until the cap is reached."""
        options = self.options
        loops = repeated(trajectory.turns, options.compared == "grams", options.threshold)
        total = np.minimum(options.penalty * np.cumsum(loops), options.penalty_cap)
        return np.diff(total, prepend=0.0)

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Log how the episodes behaved, and whether it goes with success."""
        found = report([t for group in groups for t in group.valid])
        for name in BEHAVIORS:
            if name in found:
                metrics[f"behavior/{name}/mean"] = found[name]["mean"]
                if found[name]["auc"] is not None:
                    metrics[f"behavior/{name}/auc"] = found[name]["auc"]
