"""STEPO: credit for turns that are samples of their own (EvoCUA-1.5, arXiv 2607.09773).

With T_i turns in episode i, n_it sampled tokens in turn t, and A_i the advantage of GRPO:

    A_it = A_i / T_i                                     the turns of an episode share its advantage; a group sums to 0
    L    = - 1/G sum_i sum_t 1/n_it sum_k min(r A_it, clip(r, 1 - clip_low, 1 + clip_high) A_it)

G counts trajectories, never turns. Every token thus gets the advantage A_i / (T_i n_it), and the loss is the sum over
tokens divided by trajectories: clipping commutes with a positive factor. Turns are rows of their own where the context
is managed (`rollout.context = "window(k)"`); with the full context they are segments of one row, with equal log-probs.

What we changed: std in A_i as in GRPO, and the mean over a turn's tokens, are not stated in what we could read.
When it fails: short successes take larger steps a turn than long ones and long failures smaller ones, so a checker that
can be gamed quickly is gamed quickly. Dividing by T_i is not the gradient of the expected return: it is that of GRPO
with episodes weighted by 1 / T_i. `turn_weight = "copy"` is the plain broadcast, in which long episodes weigh more.
A KL coefficient weighs the KL summed over an episode.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from sinkflex.methods.credit import spread
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.trajectory import Group


class STEPOOptions(Options):
    """STEPO's options."""

    aggregation: Literal["token_mean", "sequence_mean", "trajectory_sum", "constant"] = "trajectory_sum"
    """How per-token losses become one number."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    turn_weight: Literal["share", "copy", "none"] = "share"
    """A turn gets A_i / T_i over its tokens, or all of A_i over its tokens (the naive broadcast), or is not a unit."""


class STEPO(Method):
    """GRPO's advantage of an episode, shared out to its turns."""

    Options = STEPOOptions
    options: STEPOOptions

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens; those of an episode sum up to A_i."""
        values = super().advantages(group)
        if self.options.turn_weight == "none":
            return values
        shared = []
        for t, advantages in zip(group.valid, values, strict=True):
            turns = len(t.turns) if self.options.turn_weight == "share" else 1
            shared.append(advantages * spread(t, np.array([1 / (turns * len(turn.action_ids)) for turn in t.turns])))
        return shared
