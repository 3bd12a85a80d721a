"""GRPO: group relative policy optimization (DeepSeekMath, arXiv 2402.03300), as the SINKFLEX-RL paper uses it.

    A_i = (R_i - mean R) / (std R + 1e-6)                 the same for every sampled token of episode i
    L   = - 1/N sum_i sum_t min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient KL

N counts the sampled tokens of the mini-batch (token mean, arXiv 2608.10357). There is no value model.

What we changed: nothing; std uses ddof 1 (as verl), epsilon 1e-6. Options switch to the sequence mean, or to Dr.GRPO
(arXiv 2503.20783: aggregation = "constant", advantage_scale = "none").
When it fails: when no group has variance, that is when every task is always or never solved; see `tasks.sampling`.
"""

from __future__ import annotations

from sinkflex.methods.method import Method


class GRPO(Method):
    """The defaults of `Method`."""
