"""Losses over the sampled tokens of a micro-batch: pure functions with explicit denominators.

Every function takes flat [N] tensors over sampled tokens (no padding exists) and returns a sum already divided by the
denominators of the whole mini-batch, so that losses of micro-batches and ranks simply add.

Shape letters: N sampled tokens of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class LossInputs:
    """What a loss sees.

    Attributes:
        policy_logprobs: [N] with gradient, at the sampling temperature.
        behavior_logprobs: [N] log-probs at sampling.
        advantages: [N].
        trajectory: [N] int64, index of the trajectory in the batch.
        trajectory_tokens: [N] sampled tokens of that trajectory (over all of its rows).
        tokens: sampled tokens of the whole mini-batch that count.
        trajectories: trajectories of the whole mini-batch that count.
        entropy: [N] with gradient, or None if the method does not need it.
        reference_logprobs: [N] of a frozen reference policy, or None.
        streams: named extra tensors, [N] or [N, K].
    """

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    trajectory: Tensor
    trajectory_tokens: Tensor
    tokens: int
    trajectories: int
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)


def aggregate(values: Tensor, inputs: LossInputs, mode: str, constant: int = 1) -> Tensor:
    """Reduce per-token values to this micro-batch's share of the mini-batch loss.

    Args:
        values: [N].
        inputs: gives the denominators.
        mode: "token_mean" (sum over tokens / tokens; DAPO, and the SINKFLEX-RL paper's normalizer),
            "sequence_mean" (mean over trajectories of their token means; GRPO, arXiv 2402.03300), or
            "constant" (sum / (trajectories x constant); Dr.GRPO, arXiv 2503.20783).
        constant: tokens a trajectory stands for in "constant".
    """
    if mode == "token_mean":
        return values.sum() / max(inputs.tokens, 1)
    if mode == "sequence_mean":
        return (values / inputs.trajectory_tokens).sum() / max(inputs.trajectories, 1)
    assert mode == "constant", mode
    return values.sum() / (max(inputs.trajectories, 1) * constant)


def clipped_surrogate(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate per token (arXiv 1707.06347), with separate ranges (clip higher, arXiv 2503.14476).

    Returns:
        [N] loss values and sums for metrics: `ratio`, `clipped`, `log_ratio_abs_max`.
    """
    log_ratio = inputs.policy_logprobs - inputs.behavior_logprobs
    ratio = log_ratio.exp()
    unclipped = ratio * inputs.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages
    with torch.no_grad():
        sums = {
            "ratio": ratio.sum(),
            "clipped": (clipped < unclipped).float().sum(),
            "log_ratio_abs_max": log_ratio.abs().max() if len(log_ratio) else log_ratio.sum(),
        }
    return -torch.minimum(unclipped, clipped), sums


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The non-negative k3 estimate of KL(policy || reference) per token (Schulman, 2020); log ratios clamped at 20."""
    log_ratio = (reference_logprobs - policy_logprobs).clamp(-20, 20)
    return log_ratio.exp() - 1 - log_ratio
