"""Chunked scores over the vocabulary equal the whole-tensor formulas, and never hold a [N, V] tensor."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sinkflex.learner import vocabulary
from sinkflex.learner.vocabulary import token_scores, weighted_logprob

N, D, V, K = 23, 8, 50, 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 4 * V * 7)  # 7 tokens: 23 leaves a ragged last chunk


def leaves(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=generator).to(dtype).requires_grad_() for rows in (N, V))
    targets = torch.randint(0, V, (N,), generator=generator)
    candidates = torch.randint(0, V, (N, K), generator=generator)
    candidates[:, 0] = targets  # a candidate may be the target
    return hidden, weight, targets, candidates


def whole(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_scores_and_gradients_equal_the_whole_tensor(dtype: torch.dtype, tolerance: float, temperature: float) -> None:
    hidden, weight, targets, candidates = leaves(dtype)
    found = token_scores(hidden, weight, targets, candidates, entropy=True, temperature=temperature)
    logprobs = whole(hidden, weight, temperature)
    true = (
        logprobs.gather(1, targets[:, None])[:, 0],
        -(logprobs.exp() * logprobs).sum(1),
        logprobs.gather(1, candidates),
    )
    for mine, exact in zip(found, true, strict=True):
        assert (mine.double() - exact).norm() <= tolerance * exact.norm()

    def curved(scores: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((score.double() ** 2).sum() for score in scores)

    gradients = [torch.autograd.grad(curved(scores), (hidden, weight)) for scores in (found, true)]
    for mine, exact in zip(*gradients, strict=True):
        assert (mine - exact).norm() <= 2 * tolerance * exact.norm()


def test_a_weighted_sum_forms_the_same_gradients_in_its_forward() -> None:
    hidden, weight, targets, _ = leaves(torch.float64)
    weights = torch.randn(N).double()
    found = weighted_logprob(hidden, weight, targets, weights, temperature=0.7)
    true = (token_scores(hidden, weight, targets, temperature=0.7).logprobs * weights).sum()
    torch.testing.assert_close(found, true)
    for mine, exact in zip(*(torch.autograd.grad(2 * x, (hidden, weight)) for x in (found, true)), strict=True):
        torch.testing.assert_close(mine, exact)


def test_a_second_backward_of_a_weighted_sum_is_refused() -> None:
    hidden, weight, targets, _ = leaves(torch.float32)
    total = weighted_logprob(hidden, weight, targets, torch.ones(N))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, targets, _ = leaves(torch.float32)
    for score in (
        lambda w: token_scores(hidden, w, targets).logprobs.sum(),
        lambda w: weighted_logprob(hidden, w, targets, torch.ones(N)),
    ):
        (trained,) = torch.autograd.grad(score(weight), hidden)
        (frozen,) = torch.autograd.grad(score(weight.detach()), hidden)
        assert torch.equal(trained, frozen)


def test_scores_without_gradient_need_no_graph() -> None:
    hidden, weight, targets, _ = leaves(torch.float32)
    with torch.no_grad():
        assert not token_scores(hidden, weight, targets).logprobs.requires_grad
        assert not weighted_logprob(hidden, weight, targets, torch.ones(N)).requires_grad


def test_bfloat16_scores_are_float32_and_close() -> None:
    hidden, weight, targets, _ = leaves(torch.bfloat16)
    found = token_scores(hidden, weight, targets, entropy=True)
    exact = whole(hidden, weight, 1.0).gather(1, targets[:, None])[:, 0]
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    assert (found.logprobs - exact).abs().max() < 0.05
    assert torch.autograd.grad(found.logprobs.sum(), weight)[0].dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    hidden = torch.randn(1000, D, requires_grad=True)
    weight, targets = torch.randn(V, D, requires_grad=True), torch.randint(0, V, (1000,))
    with LargestTensor() as largest:
        scores = token_scores(hidden, weight, targets, entropy=True)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        weighted_logprob(hidden, weight, targets, torch.ones(1000)).backward()
    assert largest.elements <= 1000 * D < 1000 * V


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(targets=torch.zeros(5, dtype=torch.long)), "expected \\[N, D\\], \\[V, D\\] and \\[N\\]"),
        (dict(weight=torch.randn(V, D).double()), "expected one dtype"),
        (dict(candidates=torch.zeros(4, 2, dtype=torch.long)), "expected \\[6, K\\]"),
        (dict(temperature=0.0), "temperature is 0.0"),
    ],
)
def test_mistakes_are_told(change: dict, message: str) -> None:
    arguments = dict(hidden=torch.randn(6, D), weight=torch.randn(V, D), targets=torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=message):
        token_scores(**{**arguments, **change})
