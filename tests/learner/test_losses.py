from __future__ import annotations

import numpy as np
import pytest
import torch

from sinkflex.learner.losses import LossInputs, aggregate, clipped_surrogate, kl_k3


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
    assert float(aggregate(values, case, "constant", 8)) == pytest.approx(16 / (2 * 8))


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
