"""Log-probs, entropies and candidate log-probs over a large vocabulary, without a [N, V] tensor.

The logits of a few hundred tokens at a time are formed, used and dropped, in float32. With z = h W^T / temperature,
p = softmax(z), H the entropy, and upstream gradients g (log-prob), c_k (candidates) and e (entropy) of one token:

    dz = g onehot(target) + sum_k c_k onehot(candidate_k) - (g + sum_k c_k) p - e p (log p + H)
    dh = dz W / temperature          dW = sum over tokens of dz h^T / temperature

`token_scores` forms the logits a second time in the backward, since g is only known then. `weighted_logprob` is told
the weight of every token beforehand, as for supervised training, so that its forward forms dh and dW chunk by chunk.

Shape letters: N tokens, D hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2**26  # of logits formed at once


class TokenScores(NamedTuple):
    """What a loss may read of each token's distribution, all float32.

    Attributes:
        logprobs: [N] log-prob of the target.
        entropy: [N] nats, if wanted.
        candidate_logprobs: [N, K], if wanted.
    """

    logprobs: Tensor
    entropy: Tensor | None
    candidate_logprobs: Tensor | None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    candidates: Tensor | None = None,
    entropy: bool = False,
    temperature: float = 1.0,
) -> TokenScores:
    """Score tokens given the hidden state that predicts each; differentiable in hidden and weight.

    Args:
        hidden: [N, D] last hidden states, after the final norm.
        weight: [V, D] of the output layer, which has no bias.
        targets: [N] int64.
        candidates: [N, K] int64, further ids to score for each token.
        entropy: also return entropies.
        temperature: logits are divided by it.

    Raises:
        ValueError: if a shape does not fit, or the temperature is not positive.
    """
    _check(hidden, weight, targets, temperature)
    if candidates is not None and (candidates.ndim != 2 or len(candidates) != len(targets)):
        raise ValueError(f"candidates has shape {tuple(candidates.shape)}; expected [{len(targets)}, K]")
    ids = targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], 1)
    logprobs, entropies = _TokenScores.apply(hidden, weight, ids, entropy, temperature)
    return TokenScores(logprobs[:, 0], entropies, None if candidates is None else logprobs[:, 1:])


def weighted_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, temperature: float = 1.0
) -> Tensor:
    """Sum over tokens of token_weights * log-prob of the target, a scalar; differentiable in hidden and weight.

    Args:
        hidden: [N, D].
        weight: [V, D].
        targets: [N] int64.
        token_weights: [N] constants, e.g. -1 / N for the mean negative log-likelihood.
        temperature: logits are divided by it.
    """
    _check(hidden, weight, targets, temperature)
    return _WeightedLogprob.apply(hidden, weight, targets, token_weights.detach(), temperature)


class _TokenScores(torch.autograd.Function):
    """Keeps hidden, weight and the entropies."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, entropy: bool, temperature: float) -> Any:
        chosen = hidden.new_empty(ids.shape, dtype=_exact(weight))
        entropies = chosen.new_empty(len(ids)) if entropy else None
        for rows in _chunks(hidden, weight):
            p, chosen[rows], logprobs = _distribution(hidden[rows], weight, ids[rows], temperature, entropy)
            if entropies is not None and logprobs is not None:
                entropies[rows] = -(p.mul_(logprobs)).sum(1)
        ctx.save_for_backward(hidden, weight, ids, entropies)
        ctx.temperature = temperature
        return chosen, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_chosen: Tensor, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, entropies = ctx.saved_tensors
        d_hidden, d_weight = _gradients(ctx, hidden, weight)
        for rows in _chunks(hidden, weight):
            p, _, logprobs = _distribution(hidden[rows], weight, ids[rows], ctx.temperature, entropies is not None)
            share = d_chosen[rows].sum(1, keepdim=True)
            if d_entropy is not None and logprobs is not None:
                share = logprobs.add_(entropies[rows, None]).mul_(d_entropy[rows, None]).add_(share)
            d_logits = p.mul_(-share).scatter_add_(1, ids[rows], d_chosen[rows])
            _accumulate(d_logits.div_(ctx.temperature), hidden, weight, rows, d_hidden, d_weight)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


class _WeightedLogprob(torch.autograd.Function):
    """Keeps the finished gradients of hidden and weight; a second backward is refused, since the first scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, temperature: float
    ) -> Tensor:
        d_hidden, d_weight = _gradients(ctx, hidden, weight)
        total = hidden.new_zeros((), dtype=_exact(weight))
        for rows in _chunks(hidden, weight):
            ids, share = targets[rows, None], token_weights[rows, None].to(total.dtype)
            p, chosen, _ = _distribution(hidden[rows], weight, ids, temperature, False)
            total += (chosen * share).sum()
            if d_hidden is not None or d_weight is not None:
                d_logits = p.mul_(-share).scatter_add_(1, ids, share)
                _accumulate(d_logits.div_(temperature), hidden, weight, rows, d_hidden, d_weight)
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if gradient is None else gradient.mul_(upstream) for gradient in ctx.saved_tensors)
        return (*scaled, None, None, None)


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _exact(weight: Tensor) -> torch.dtype:
    """float32, or float64 for float64 weights."""
    return torch.promote_types(torch.float32, weight.dtype)


def _distribution(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, keep_logprobs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Probabilities [n, V], log-probs of the ids [n, k], and, if wanted, all log-probs [n, V]."""
    logits = (hidden @ weight.T).to(_exact(weight)).div_(temperature)
    logits -= logits.amax(1, keepdim=True)
    if keep_logprobs:
        p = logits.exp()
        total = p.sum(1, keepdim=True)
        logits -= total.log()
        return p.div_(total), logits.gather(1, ids), logits
    chosen = logits.gather(1, ids)
    p = logits.exp_()
    total = p.sum(1, keepdim=True)
    return p.div_(total), chosen - total.log(), None


def _gradients(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Room for the gradients of hidden [N, D] and weight [V, D]; None for what is frozen."""
    d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    return d_hidden, torch.zeros_like(weight, dtype=_exact(weight)) if ctx.needs_input_grad[1] else None


def _accumulate(
    d_logits: Tensor, hidden: Tensor, weight: Tensor, rows: slice, d_hidden: Tensor | None, d_weight: Tensor | None
) -> None:
    d_logits = d_logits.to(weight.dtype)
    if d_hidden is not None:
        torch.mm(d_logits, weight, out=d_hidden[rows])
    if d_weight is not None and d_weight.dtype == weight.dtype:
        d_weight.addmm_(d_logits.T, hidden[rows])
    elif d_weight is not None:
        d_weight += d_logits.T @ hidden[rows]


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        raise ValueError(f"{shapes}; expected [N, D], [V, D] and [N]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; expected one dtype")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; expected a positive number")
