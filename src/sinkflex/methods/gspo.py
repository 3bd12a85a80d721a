"""GSPO: group sequence policy optimization (arXiv 2507.18071), as LHMTA-RL (arXiv 2608.00181) uses it on long tasks.

    s_i = exp(1/|y_i| sum_t log r_it)                   one ratio for a whole episode: the geometric mean of its tokens'
    L   = - mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

|y_i| counts the sampled tokens of the episode, over all its turns and rows. `level = "token"` gives each token the same
value s_i and a gradient of its own, s_i grad log p_t, so that advantages may differ within an episode.

What we changed: one multi-turn episode is one sequence, and the clip range is 3e-4 / 4e-4 (neither is stated by
LHMTA-RL). The log ratio is held at 10, as verl does. A correction compares sampler and learner token by token.
When it fails: a clip range this narrow acts once several updates use one batch; with one, s_i is 1 and GSPO is GRPO
with the sequence mean. Where few tokens of a long episode move, their ratio drowns in the mean. Where sampler and
learner are two engines, their noise alone leaves this range: a correction takes it out of s_i, which then is against
the learner's own log-probs, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from sinkflex.learner.losses import LossInputs, trajectory_mean
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options

MAX_LOG_RATIO = 10.0


class GSPOOptions(Options):
    """GSPO's options."""

    aggregation: Literal["token_mean", "sequence_mean", "trajectory_sum", "constant"] = "sequence_mean"
    """How per-token losses become one number."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """The ratio of an episode is clipped below at 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The ratio of an episode is clipped above at 1 + clip_high."""
    level: Literal["sequence", "token"] = "sequence"
    """What carries the gradient: the episode's ratio, or each token at the episode's value."""


class GSPO(Method):
    """GRPO with the ratio of the whole episode in place of each token's."""

    Options = GSPOOptions
    options: GSPOOptions

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss: the base's, with every token at its episode's ratio."""
        log_ratio = trajectory_mean(inputs.log_ratio, inputs).clamp(max=MAX_LOG_RATIO)
        # Against this anchor the log ratio of each token is the episode's, with or without its gradient.
        anchor = inputs.policy_logprobs - log_ratio
        anchor = anchor if self.options.level == "sequence" else anchor.detach()
        if inputs.proximal_logprobs is not None:  # the correction's weight stays that of each token
            engines = inputs.proximal_logprobs - inputs.behavior_logprobs
            inputs = replace(inputs, behavior_logprobs=anchor.detach() - engines)
        return super().loss(replace(inputs, proximal_logprobs=anchor))
