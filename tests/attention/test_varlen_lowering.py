"""The CUDA lowering without CUDA: its calls, given an operator that does what the flash operator documents, are exact.

The operator's schema is checked on meta tensors. The kernels themselves are tested in test_attention_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import CASES, Case, errors, plans, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sinkflex.attention import sink, varlen
from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention


def segments(bounds: Tensor, key_bounds: Tensor, causal: bool, left: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys and the mask of each sequence: bottom-right causal, at most `left` keys before a query's own."""
    pairs = zip(bounds.tolist(), bounds.tolist()[1:], key_bounds.tolist(), key_bounds.tolist()[1:], strict=False)
    for q_start, q_stop, k_start, k_stop in pairs:
        n, m = q_stop - q_start, k_stop - k_start
        behind = torch.arange(n)[:, None] + (m - n) - torch.arange(m)
        seen = torch.ones(n, m, dtype=torch.bool)
        if causal:
            seen = behind >= 0
            if left >= 0:
                seen &= behind <= left
        yield slice(q_start, q_stop), slice(k_start, k_stop), seen


def scores(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~seen, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, key_bounds: Tensor, most: int, most_keys: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert window_size_right == (0 if causal else -1)
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for rows, keys, seen in segments(bounds, key_bounds, causal, window_size_left):
        assert rows.stop - rows.start <= most and keys.stop - keys.start <= most_keys
        s = scores(q[rows], k[keys], scale, seen)
        lse[:, rows] = s.logsumexp(-1)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, key_bounds: Tensor,
    most: int, most_keys: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for rows, keys, seen in segments(bounds, key_bounds, causal, window_size_left):
        p = (scores(q[rows], k[keys], scale, seen) - lse[:, rows, None]).exp()
        d_p = torch.einsum("qhd,khd->hqk", d_out[rows], v[keys].repeat_interleave(group, 1))
        d_s = p * (d_p - (d_out[rows] * out[rows]).sum(-1).T[..., None]) * scale
        grads[0][rows] += torch.einsum("hqk,khd->qhd", d_s, k[keys].repeat_interleave(group, 1))
        for grad, weight, other in ((grads[1], d_s, q), (grads[2], p, d_out)):
            grad[keys] += torch.einsum("hqk,qhd->khd", weight, other[rows]).unflatten(1, (-1, group)).sum(2)
    return grads


@pytest.fixture
def on_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_forward", forward)
    monkeypatch.setattr(varlen, "_backward", backward)
    monkeypatch.setattr(sink, "_kernel", lambda q: varlen)


@pytest.mark.usefixtures("on_varlen")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_within_1e_6_of_float64(case: Case) -> None:
    t = tensors(case, size=12)  # not a multiple of 8
    found = t.gradients(sink_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window))
    assert max(errors(case, t, found)) <= 2e-6


@settings(max_examples=40, deadline=None)
@given(plan=plans(), window=st.sampled_from([None, 1, 3, 8]))
def test_each_level_holds_a_query_once(plan: Plan, window: int | None) -> None:
    calls = varlen._calls(plan, window, torch.device("cpu"))
    assert all(len(call.queries.unique()) == len(call.queries) for call in calls)
    assert [call.first for call in calls] == sorted((call.first for call in calls), reverse=True)


def test_answers_to_one_prompt_are_two_calls() -> None:
    plan = next(case.plan for case in CASES if case.name == "shared prompt")
    assert len(varlen._calls(plan, None, torch.device("cpu"))) == 2
    assert len(varlen._calls(plan, 16, torch.device("cpu"))) == 1


def test_the_operators_accept_our_arguments() -> None:
    q, k = (torch.empty(20, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (8, 2))
    bounds = torch.empty(3, device="meta", dtype=torch.int32)
    options = dict(scale=0.25, window_size_left=7, window_size_right=0)
    out, lse, *_ = varlen._forward(q, k, k, bounds, bounds, 10, 10, 0.0, True, False, **options)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 20), torch.float32)
    state = torch.empty(2, device="meta", dtype=torch.uint64), torch.empty(0, device="meta")
    grads = varlen._backward(q, q, k, k, out, lse, bounds, bounds, 10, 10, 0.0, True, *state, **options)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
