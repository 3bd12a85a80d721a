"""Losses over the sampled tokens of a micro-batch: pure functions with explicit denominators.

Every function takes flat [N] tensors over sampled tokens (no padding exists). What becomes the loss is divided by the
denominators of the whole mini-batch, so that losses of micro-batches and ranks simply add.

The three policies of a token, and what stands between them:

    behavior  ── weight = proximal / behavior ──►  proximal  ── ratio = policy / proximal ──►  policy
    (sampler)    (the engines differ)              (learner, before the first update)          (being trained)

Without a correction the proximal policy is the behavior policy: the weight is 1, and the ratio holds both.

Shape letters: N sampled tokens of the micro-batch, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Sums = dict[str, Tensor]


class Counts(NamedTuple):
    """Denominators: sampled tokens and trajectories of the whole mini-batch, over all micro-batches and ranks.

    `tokens` and `trajectories` leave out groups that teach nothing, unless the method counts them; `all_tokens` and
    `all_trajectories` count every group.
    """

    tokens: int
    trajectories: int
    all_tokens: int
    all_trajectories: int


@dataclass(slots=True)
class LossInputs:
    """What a loss sees.

    Attributes:
        policy_logprobs: [N] with gradient, at the sampling temperature.
        behavior_logprobs: [N] log-probs at sampling.
        advantages: [N].
        trajectory: [N] int64, index of the trajectory in the batch; all its tokens are in one micro-batch.
        trajectory_tokens: [N] sampled tokens of that trajectory (over all of its rows).
        tokens, trajectories, all_tokens, all_trajectories: denominators, see `Counts`; all_* of 0 stand for the others.
        entropy: [N] with gradient, or None if the method does not need it.
        reference_logprobs: [N] of a frozen reference policy, or None.
        proximal_logprobs: [N] under the weights before the batch's first update, or None where nothing is corrected.
        candidate_logprobs: [N, K] with gradient, of the ids in the stream the method names, or None.
        streams: named extra tensors of the rows, [N] or [N, K].
    """

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    trajectory: Tensor
    trajectory_tokens: Tensor
    tokens: int
    trajectories: int
    all_tokens: int = 0
    all_trajectories: int = 0
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)

    @property
    def log_ratio(self) -> Tensor:
        """[N] with gradient: policy against proximal log-probs, or against behavior ones without a correction."""
        anchor = self.behavior_logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return self.policy_logprobs - anchor


def aggregate(values: Tensor, inputs: LossInputs, mode: str, constant: int = 1, every_group: bool = False) -> Tensor:
    """Reduce per-token values to this micro-batch's share of the mini-batch loss.

    Args:
        values: [N].
        inputs: gives the denominators.
        mode: "token_mean" (sum over tokens / tokens; DAPO, arXiv 2503.14476, and the SINKFLEX-RL paper's normalizer),
            "sequence_mean" (mean over trajectories of their token means; GRPO, arXiv 2402.03300),
            "trajectory_sum" (sum / trajectories; the plain policy gradient, RLOO, arXiv 2402.14740), or
            "constant" (sum / (trajectories x constant); Dr.GRPO, arXiv 2503.20783).
        constant: tokens a trajectory stands for in "constant".
        every_group: divide by the counts of all groups; for terms that groups without advantage have too.
    """
    tokens, trajectories = inputs.tokens, inputs.trajectories
    if every_group:
        tokens, trajectories = inputs.all_tokens or tokens, inputs.all_trajectories or trajectories
    if mode == "token_mean":
        return values.sum() / max(tokens, 1)
    if mode == "sequence_mean":
        return (values / inputs.trajectory_tokens).sum() / max(trajectories, 1)
    assert mode in ("trajectory_sum", "constant"), mode
    return values.sum() / (max(trajectories, 1) * (constant if mode == "constant" else 1))


def clipped_surrogate(
    inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate per token (arXiv 1707.06347), with separate ranges (clip higher, arXiv 2503.14476).

    Args:
        inputs: the micro-batch.
        clip_low, clip_high: the ratio counts as at least 1 - clip_low and at most 1 + clip_high.
        dual_clip: where the advantage is negative the objective is at least dual_clip x advantage (arXiv 1912.09729),
            so that a large ratio has no large gradient; 0 switches it off.

    Returns:
        [N] loss values and sums for metrics: `ratio`, `clipped` (tokens without gradient), `log_ratio_abs_max`.
    """
    ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, objective.maximum(dual_clip * advantages), objective)
    with torch.no_grad():
        sums = _ratio_sums(inputs, ratio, objective != unclipped)
    return -objective, sums


def cispo(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[Tensor, Sums]:
    """CISPO's surrogate per token (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a weight without gradient.

    Unlike under PPO's clipping, a token outside the range keeps its gradient.

    Returns:
        [N] loss values -clip(ratio) A log p, and the sums of `clipped_surrogate`.
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * inputs.advantages * inputs.policy_logprobs, _ratio_sums(inputs, ratio, weight != ratio)


def mismatch_weight(inputs: LossInputs, correction: str, low: float, high: float) -> tuple[Tensor, Sums]:
    """Weights [N] without gradient for sampler and learner giving one token different probabilities.

    With r_t = proximal / behavior of a token:

    - "token_truncate": r_t, held between low and high (truncated importance sampling);
    - "token_mask": r_t between low and high, 0 outside;
    - "trajectory_mask": the geometric mean of r_t over the whole trajectory, between low and high, 0 outside.

    A product of ratios over a trajectory is none of them: noise of 0.02 a token moves it off 1 by the root of the
    length, and training stops at long trajectories. The geometric mean stays at 1.

    Returns:
        The weights, and sums for metrics, of the weight before it is bounded: `importance_weight`,
        `importance_weight_squared`; and `corrected` (tokens whose weight was bounded).
    """
    assert inputs.proximal_logprobs is not None
    log_weight = (inputs.proximal_logprobs - inputs.behavior_logprobs).detach()
    if correction == "trajectory_mask":
        log_weight = trajectory_mean(log_weight, inputs)
    weight = log_weight.exp()
    inside = (weight >= low) & (weight <= high)
    sums = {
        "importance_weight": weight.sum(),
        "importance_weight_squared": weight.square().sum(),
        "corrected": (~inside).float().sum(),
    }
    if correction == "token_truncate":
        return weight.clamp(low, high), sums
    assert correction in ("token_mask", "trajectory_mask"), correction
    return torch.where(inside, weight, 0.0), sums


def trajectory_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return for each token the mean of [N] values over all sampled tokens of its trajectory; differentiable."""
    _, place = inputs.trajectory.unique(return_inverse=True)
    sums = values.new_zeros(len(values)).index_add(0, place, values / inputs.trajectory_tokens)
    return sums[place]


def kl_estimate(inputs: LossInputs, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token [N], as a loss whose gradient is stated here.

    With d = policy - reference log-probs (Schulman, "Approximating KL divergence", 2020):

    - "k1": d as a cost of its token, the reward form: value ratio x d with d fixed, gradient ratio d grad log p. This
      is the policy gradient of the divergence. As a plain loss k1 would have the gradient grad log p, which does not
      know the reference and has mean 0.
    - "k2": d^2 / 2. The same gradient d grad log p where the ratio is 1; the value is biased.
    - "k3": exp(-d) - 1 + d, unbiased and never negative. Its gradient (1 - exp(-d)) grad log p is, in the mean, that of
      the other direction, KL(reference || policy).
    - "k3_ratio": ratio x k3, whose mean and gradient are those of KL(policy || reference) also off-policy.

    d is clamped at 20 inside exp. The ratio is the policy's to the behavior policy.
    """
    assert inputs.reference_logprobs is not None
    d = inputs.policy_logprobs - inputs.reference_logprobs
    if estimator == "k2":
        return d.square() / 2
    k1 = estimator == "k1"
    values = d.detach() if k1 else kl_k3(inputs.policy_logprobs, inputs.reference_logprobs)
    if estimator == "k3":
        return values
    assert k1 or estimator == "k3_ratio", estimator
    return (inputs.policy_logprobs - inputs.behavior_logprobs).exp() * values


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The non-negative k3 estimate of KL(policy || reference) per token (Schulman, 2020); log ratios clamped at 20."""
    log_ratio = (reference_logprobs - policy_logprobs).clamp(-20, 20)
    return log_ratio.exp() - 1 - log_ratio


def _ratio_sums(inputs: LossInputs, ratio: Tensor, clipped: Tensor) -> Sums:
    gap = (inputs.policy_logprobs - inputs.behavior_logprobs).detach().abs()
    return {
        "ratio": ratio.detach().sum(),
        "clipped": clipped.float().sum(),
        "log_ratio_abs_max": gap.max() if len(gap) else gap.sum(),
    }
