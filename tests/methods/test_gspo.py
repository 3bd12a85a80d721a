from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sinkflex.learner.losses import mismatch_weight
from sinkflex.methods.method import build_method
from tests.methods.episodes import loss_inputs

LENGTHS = (1, 4, 7, 3)
A = (1.3, -0.7, 0.4, -1.0)


def batch(seed: int, spread: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Policy and behavior log-probs in float64, and advantages."""
    rng = torch.Generator().manual_seed(seed)
    behavior = [-torch.rand(n, generator=rng, dtype=torch.float64) * 3 for n in LENGTHS]
    policy = [(b + spread * torch.randn(len(b), generator=rng, dtype=torch.float64)).requires_grad_() for b in behavior]
    return policy, behavior, [torch.full((n,), a, dtype=torch.float64) for n, a in zip(LENGTHS, A, strict=True)]


def reference(policy: list[Tensor], behavior: list[Tensor], low: float, high: float, level: str) -> Tensor:
    """The formula, episode by episode."""
    total = torch.zeros((), dtype=torch.float64)
    for p, b, a in zip(policy, behavior, A, strict=True):
        s = ((p - b).sum() / len(p)).exp()
        if level == "sequence":
            total = total - torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
        else:
            of_tokens = s.detach() * (p - p.detach()).exp()
            total = total - torch.minimum(of_tokens * a, of_tokens.clamp(1 - low, 1 + high) * a).mean()
    return total / len(policy)


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize(("spread", "low", "high"), [(0.0, 3e-4, 4e-4), (0.3, 0.1, 0.2), (0.3, 3e-4, 4e-4)])
def test_value_and_gradient_are_those_of_the_formula(level: str, spread: float, low: float, high: float) -> None:
    gspo = build_method("gspo", {"level": level, "clip_low": low, "clip_high": high}, 100)
    policy, behavior, advantages = batch(3, spread)
    wanted = reference(policy, behavior, low, high, level)
    gradients = torch.autograd.grad(wanted, policy)
    value, _ = gspo.loss(loss_inputs(policy, behavior, advantages))
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)
    for got, want in zip(torch.autograd.grad(value, policy), gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_shares_of_micro_batches_add_up() -> None:
    gspo = build_method("gspo", {"clip_low": 0.1, "clip_high": 0.1}, 100)
    policy, behavior, advantages = batch(5, 0.2)
    whole = gspo.loss(loss_inputs(policy, behavior, advantages))[0]
    parts = [gspo.loss(loss_inputs(policy, behavior, advantages, cut))[0] for cut in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(parts), whole)


def test_episodes_of_one_token_make_it_grpo() -> None:
    policy, behavior, advantages = batch(7, 0.3)
    p, b, a = ([t[:1] for t in of] for of in (policy, behavior, advantages))
    options = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence_mean"}
    values = [build_method(name, options, 100).loss(loss_inputs(p, b, a))[0] for name in ("gspo", "grpo")]
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-14)


def test_a_token_far_off_moves_the_whole_episode_only_by_its_share() -> None:
    policy, behavior, advantages = batch(9, 0.0)
    far = [p.detach().clone() for p in policy]
    far[2][0] += 0.7
    sums = build_method("gspo", {}, 100).loss(loss_inputs(far, behavior, advantages))[1]
    unmoved = sum(LENGTHS) - LENGTHS[2]
    assert float(sums["ratio"]) == pytest.approx(unmoved + LENGTHS[2] * torch.tensor(0.1).exp().item())


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "trajectory_mask"])
def test_a_correction_weighs_tokens_and_the_ratio_is_against_the_learner(correction: str) -> None:
    rng = torch.Generator().manual_seed(1)
    policy, behavior, advantages = batch(11, 0.3)
    proximal = [b + 0.5 * torch.randn(len(b), generator=rng, dtype=torch.float64) for b in behavior]
    inputs = replace(loss_inputs(policy, behavior, advantages), proximal_logprobs=torch.cat(proximal))
    options = {"correction": correction, "correction_low": 0.7, "correction_high": 1.4}
    value, sums = build_method("gspo", {**options, "clip_low": 0.1, "clip_high": 0.1}, 100).loss(inputs)
    weights, of_weight = mismatch_weight(inputs, correction, 0.7, 1.4)
    wanted = torch.zeros((), dtype=torch.float64)
    for p, q, a, w in zip(policy, proximal, A, weights.split(LENGTHS), strict=True):
        s = ((p - q).sum() / len(p)).exp()
        wanted = wanted - w.mean() * torch.minimum(s * a, s.clamp(0.9, 1.1) * a) / len(policy)
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sums["importance_weight"], of_weight["importance_weight"])
    for got, want in zip(torch.autograd.grad(value, policy), torch.autograd.grad(wanted, policy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_noise_of_the_engines_clips_episodes_though_their_ratio_is_unbiased_and_a_correction_does_not() -> None:
    episodes, clipped = 400, {}
    for tokens in (100, 1000):
        rng = torch.Generator().manual_seed(tokens)
        policy = [torch.full((tokens,), -1.0) for _ in range(episodes)]
        behavior = [p + 0.02 * torch.randn(tokens, generator=rng) for p in policy]
        inputs = loss_inputs(policy, behavior, [torch.ones(tokens)] * episodes)
        sums = build_method("gspo", {}, 100).loss(inputs)[1]
        assert float(sums["ratio"]) / (episodes * tokens) == pytest.approx(1.0, abs=5e-4)
        clipped[tokens] = float(sums["clipped"]) / (episodes * tokens)
        corrected = build_method("gspo", {"correction": "token_truncate"}, 100)
        value, sums = corrected.loss(replace(inputs, proximal_logprobs=inputs.policy_logprobs))
        assert float(sums["clipped"]) == 0 and float(value) == pytest.approx(-1.0, abs=1e-3)
    # P(mean of the noise < -4e-4): 0.42 of 100 tokens, 0.26 of 1,000.
    assert clipped[100] == pytest.approx(0.42, abs=0.06) and clipped[1000] == pytest.approx(0.26, abs=0.06)
