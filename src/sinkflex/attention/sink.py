"""`sink_attention`: attention with learned sinks over a plan, forward and backward, memory linear in length.

A sink is one learned logit per head that takes part in the softmax and has no value: it lets a head attend to nothing.
Given the out and log-sum-exp (lse) of any kernel without sinks,

    lse' = logaddexp(lse, sink)      out' = out * exp(lse - lse')      in float32
    d sink = - sum over tokens of exp(sink - lse') * (d_out . out')

and dq, dk, dv are what the same kernel's backward returns when it is given (out', lse') in place of (out, lse).

Shape letters: B rows, H query heads, K key heads, T tokens of a row, D head size, N = B * T.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sinkflex.attention import aten, varlen
from sinkflex.attention.plan import Plan

HALF = (torch.float16, torch.bfloat16)
BACKENDS = ("pieces", "flex")


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    backend: str = "pieces",
) -> Tensor:
    """Attention of the tokens of `plan` with learned sinks.

    Args:
        q: [B, H, T, D]; the plan describes the B * T tokens, row after row.
        k: [B, K, T, D] with H a multiple of K.
        v: [B, K, T, D].
        plan: which token sees which.
        sinks: [H] learned logits, or None.
        scale: of the scores; 1 / sqrt(D) by default.
        window: keys a token sees, itself included; None for all.
        backend: "pieces" runs on CPU and CUDA; "flex" is FlexAttention, on CUDA.

    Returns:
        [B, H, T, D] in the dtype of q; 0 for padding, which gives no gradient either. On CPU half precision is stored
        and float32 computed.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other, or no back end runs them.
    """
    _check(q, k, v, plan, sinks)
    _check_backend(q, backend)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "flex":
        from sinkflex.attention import flex

        return flex.attention(q, k, v, sinks, plan, window, factor)
    return _SinkAttention.apply(q, k, v, sinks, plan, window, factor)


class _SinkAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and its log-sum-exp: linear in length.

    Where half precision is computed in float32, it also keeps what rounding took from the output: d_out . out cancels,
    and the gradient of a sink is made of nothing else.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: Plan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        run = _RESULTS.get()
        results = next(run) if isinstance(run, Iterator) else _with_sinks(q, k, v, sinks, plan, window, scale)
        if isinstance(run, list):
            run.append(results)
        out, rounded_off, lse = results
        batch, _, tokens, size = q.shape
        out = out.view(batch, tokens, -1, size).transpose(1, 2)
        ctx.save_for_backward(q, k, v, sinks, out, rounded_off, lse)
        ctx.plan, ctx.window, ctx.scale = plan, window, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, rounded_off, lse = ctx.saved_tensors
        kernel = _kernel(q)
        d_out, out, *qkv = (_tokens(x, kernel) for x in (d_out, out, q, k, v))
        if rounded_off is not None:
            out += rounded_off
        d_sinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype) - lse).exp_()
            d_sinks = -(share * (d_out.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)
        grads = kernel.backward(d_out, *qkv, out, lse, ctx.plan, ctx.window, ctx.scale)
        d_qkv = (
            grad.to(x.dtype).view(x.shape[0], x.shape[2], -1, x.shape[3]).transpose(1, 2)
            for grad, x in zip(grads, (q, k, v), strict=True)
        )
        return (*d_qkv, d_sinks, None, None, None)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, window: int | None, scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output [N, H, D] in the dtype of q, what rounding took from it (if it was exact), log-sum-exp [N, H]."""
    kernel = _kernel(q)
    exact, lse = kernel.forward(*(_tokens(x, kernel) for x in (q, k, v)), plan, window, scale)
    if sinks is not None:
        joint = torch.logaddexp(lse, sinks.to(lse.dtype))
        exact.mul_((lse - joint).exp_()[..., None])
        lse = joint
    out = exact.to(q.dtype)
    return out, (exact - out).to(q.dtype) if q.dtype in HALF and kernel is aten else None, lse


def _kernel(q: Tensor) -> Any:
    """The module whose forward and backward run these tensors; `varlen` computes half precision as it is."""
    return varlen if q.device.type == "cuda" and q.dtype in HALF else aten


_RESULTS: ContextVar[list | Iterator | None] = ContextVar("results of attention to keep, or kept", default=None)


class _Run(AbstractContextManager):
    """A run that appends its results of attention to a list, or, as the second run, takes them from it."""

    def __init__(self, results: list, second: bool) -> None:
        self.results, self.second = results, second

    def __enter__(self) -> None:
        self.token = _RESULTS.set(iter(self.results) if self.second else self.results)

    def __exit__(self, *_: object) -> None:
        _RESULTS.reset(self.token)


def kept_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for the first and the second run of a checkpointed region: the second finds the attention of the first.

    For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=kept_attention)`.
    """
    results: list = []
    return _Run(results, second=False), _Run(results, second=True)


def _tokens(x: Tensor, kernel: Any) -> Tensor:
    """[B, H, T, D] to [N, H, D], in float32 if the kernel wants it; a view when it can be one."""
    x = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return x.float() if x.dtype in HALF and kernel is aten else x


def _check_backend(q: Tensor, backend: str) -> None:
    if backend not in BACKENDS:
        near = difflib.get_close_matches(str(backend), BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}{hint}")
    if backend == "flex" and q.device.type != "cuda":
        raise ValueError(f"FlexAttention has no backward on {q.device.type}; use backend='pieces'")
    if q.device.type not in ("cpu", "cuda") or (q.device.type == "cuda" and q.dtype == torch.float64):
        raise ValueError(f"no kernel with sinks for {q.dtype} on {q.device.type}; use float32 on CPU or CUDA")


def _check(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None) -> None:
    if q.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes}; expected q [B, H, T, D] and k, v [B, K, T, D]")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads over {k.shape[1]} key heads; expected a multiple")
    if len(plan) != q.shape[0] * q.shape[2]:
        raise ValueError(f"the plan describes {len(plan)} tokens; expected B * T = {q.shape[0] * q.shape[2]}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"{kinds}; expected one dtype and one device")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; expected one per query head: ({q.shape[1]},)")
