from __future__ import annotations

import numpy as np
import pytest
import torch

from sinkflex.learner.losses import LossInputs, aggregate, cispo, clipped_surrogate, kl_estimate, kl_k3, mismatch_weight
from sinkflex.methods.grpo import GRPO


def inputs(policy: list[float], behavior: list[float], advantages: list[float], owner: list[int]) -> LossInputs:
    lengths = [owner.count(i) for i in owner]
    return LossInputs(
        torch.tensor(policy, dtype=torch.float64, requires_grad=True),
        torch.tensor(behavior, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(owner),
        torch.tensor(lengths),
        tokens=len(owner),
        trajectories=len(set(owner)),
    )


def test_aggregation_by_hand() -> None:
    case = inputs([0.0] * 4, [0.0] * 4, [1.0] * 4, [0, 0, 0, 1])
    values = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    assert float(aggregate(values, case, "token_mean")) == pytest.approx(16 / 4)
    assert float(aggregate(values, case, "sequence_mean")) == pytest.approx((2 + 10) / 2)
    assert float(aggregate(values, case, "trajectory_sum")) == pytest.approx(16 / 2)
    assert float(aggregate(values, case, "constant", 8)) == pytest.approx(16 / (2 * 8))
    case.all_tokens, case.all_trajectories = 8, 4
    assert float(aggregate(values, case, "token_mean", every_group=True)) == pytest.approx(16 / 8)
    assert float(aggregate(values, case, "sequence_mean", every_group=True)) == pytest.approx((2 + 10) / 4)


def test_the_surrogate_is_clipped_only_where_that_lowers_the_objective() -> None:
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0]
    case = inputs(np.log(ratios).tolist(), [0.0] * 5, advantages, [0] * 5)
    values, sums = clipped_surrogate(case, 0.2, 0.2)
    np.testing.assert_allclose(values.detach().numpy(), [-1.2, 1.5, -0.5, 0.8, -1.1])
    assert float(sums["clipped"]) == 2
    (gradient,) = torch.autograd.grad(values.sum(), case.policy_logprobs)
    np.testing.assert_allclose(gradient.numpy(), [0, 1.5, -0.5, 0, -1.1])


def test_an_asymmetric_clip_moves_the_upper_edge_alone() -> None:
    case = inputs([float(np.log(1.25)), float(np.log(0.75))], [0.0, 0.0], [1.0, -1.0], [0, 0])
    values, sums = clipped_surrogate(case, 0.2, 0.28)
    np.testing.assert_allclose(values.detach().numpy(), [-1.25, 0.8])
    assert float(sums["clipped"]) == 1


def test_k3_is_zero_at_equality_never_negative_and_finite_far_away() -> None:
    policy = torch.tensor([0.0, -1.0, -2.0, -300.0])
    reference = torch.tensor([0.0, -2.0, -1.0, 0.0])
    values = kl_k3(policy, reference)
    assert values[0] == 0
    assert bool((values >= 0).all()) and bool(values.isfinite().all())


def test_the_mean_of_k3_under_the_policy_is_the_kl_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * kl_k3(policy, reference)).sum()) == pytest.approx(float(expected))


def test_dual_clip_bounds_the_loss_of_a_bad_token_however_large_its_ratio() -> None:
    ratios = np.array([10.0, 2.0, 10.0])
    case = inputs(np.log(ratios).tolist(), [0.0] * 3, [-1.0, -1.0, 1.0], [0] * 3)
    values, sums = clipped_surrogate(case, 0.2, 0.2, dual_clip=3.0)
    np.testing.assert_allclose(values.detach().numpy(), [3.0, 2.0, -1.2])
    (gradient,) = torch.autograd.grad(values.sum(), case.policy_logprobs)
    np.testing.assert_allclose(gradient.numpy(), [0, 2.0, 0])
    assert float(sums["clipped"]) == 2


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    ratios = np.array([1.5, 1.5, 0.5])
    case = inputs(np.log(ratios).tolist(), [0.0] * 3, [1.0, -1.0, 1.0], [0] * 3)
    values, sums = cispo(case, clip_low=1.0, clip_high=0.2)
    (gradient,) = torch.autograd.grad(values.sum(), case.policy_logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-1.2, 1.2, -0.5])
    assert float(sums["clipped"]) == 2


def test_weights_by_hand() -> None:
    case = inputs([0.0] * 4, [0.0] * 4, [1.0] * 4, [0, 0, 0, 1])
    case.proximal_logprobs = torch.tensor([4.0, 0.5, 0.25, 1.5], dtype=torch.float64).log()
    for correction, expected in (
        ("token_truncate", [2.0, 0.5, 0.5, 1.5]),
        ("token_mask", [0.0, 0.5, 0.0, 1.5]),
        ("trajectory_mask", [0.5 ** (1 / 3)] * 3 + [1.5]),
    ):
        weight, sums = mismatch_weight(case, correction, 0.5, 2.0)
        np.testing.assert_allclose(weight.numpy(), expected)
        assert float(sums["corrected"]) == (0 if correction == "trajectory_mask" else 2)
    assert mismatch_weight(case, "trajectory_mask", 0.9, 1.2)[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("tokens", [200, 8_000, 20_000])
@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "trajectory_mask"])
def test_noise_of_the_engines_leaves_the_mean_weight_at_1_at_any_length(correction: str, tokens: int) -> None:
    """0.02 a token moves a product over 8,000 tokens by a factor of six."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(16).repeat_interleave(tokens)
    policy = torch.full((len(owner),), -1.0, requires_grad=True)
    behavior = policy.detach() + 0.02 * torch.randn(len(owner), generator=generator)
    case = LossInputs(
        policy, behavior, torch.ones(len(owner)), owner, torch.full((len(owner),), tokens), len(owner), 16
    )
    case.proximal_logprobs = policy.detach()
    weight, sums = mismatch_weight(case, correction, 0.5, 2.0)
    assert abs(float(weight.mean()) - 1) < 0.05
    mean, square = (float(sums[name]) / len(owner) for name in ("importance_weight", "importance_weight_squared"))
    assert abs(mean - 1) < 0.05 and mean**2 / square > 0.99, "the effective share of the tokens"
    loss, _ = GRPO({"correction": correction}, 1).loss(case)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert abs(float(gradient.sum()) + 1) < 0.05


def mean_of_estimate(estimator: str, off_policy: bool) -> tuple[list[torch.Tensor], float, float]:
    """Exact over 6 tokens: gradients of the estimate and of the divergence both ways; the estimate; the divergence."""
    generator = torch.Generator().manual_seed(0)
    logits, other, old = (torch.randn(6, generator=generator, dtype=torch.float64) * 0.5 for _ in range(3))
    logits.requires_grad_()
    policy, reference = logits.log_softmax(-1), other.log_softmax(-1)
    behavior = old.log_softmax(-1) if off_policy else policy.detach()
    ones = torch.ones(6, dtype=torch.float64)
    case = LossInputs(policy, behavior, ones, torch.arange(6), ones, 6, 6, reference_logprobs=reference)
    mean = (behavior.exp() * kl_estimate(case, estimator)).sum()
    reverse = (policy.exp() * (policy - reference)).sum()
    forward = (reference.exp() * (reference - policy)).sum()
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, reverse, forward)]
    return gradients, float(mean.detach()), float(reverse.detach())


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio"])
def test_the_mean_gradient_of_a_kl_estimate_is_the_one_it_claims(estimator: str, off_policy: bool) -> None:
    (found, reverse, forward), value, divergence = mean_of_estimate(estimator, off_policy)
    if off_policy and estimator in ("k2", "k3"):
        assert not torch.allclose(found, reverse, rtol=1e-2), "only the weighted estimates are right off-policy"
        return
    torch.testing.assert_close(found, forward if estimator == "k3" else reverse)
    if estimator != "k2":
        assert value == pytest.approx(divergence)


def test_k1_as_a_plain_loss_would_not_know_the_reference() -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    plain = (policy.detach().exp() * policy).sum()
    (gradient,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(gradient, torch.zeros(6, dtype=torch.float64))
