"""float32 on CUDA without CUDA: the calls, given an operator that does and demands what the efficient one does.

The operator's schema is checked on meta tensors. The kernel itself is tested in test_attention_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, Case, errors, tensors
from torch import Tensor

from sinkflex.attention import aten
from sinkflex.attention.sink import sink_attention


def scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    assert q.shape[1] == k.shape[1], "the operator has no grouped heads"
    s = q @ k.mT * scale
    if bias is not None:
        assert bias.shape == s.shape and bias.stride(3) == 1 and bias.stride(2) % 4 == 0, "rows are aligned to 16 bytes"
        s = s + bias
    if causal:  # from the top left corner
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return s


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, ...]:
    s = scores(q, k, bias, causal, scale)
    lse = torch.nn.functional.pad(s.logsumexp(-1), (0, -s.shape[2] % 32), value=torch.inf)
    return s.softmax(-1) @ v, lse, torch.zeros(()), torch.zeros(())


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert lse.is_contiguous() and lse.shape[2] % 32 == 0
    p = (scores(q, k, bias, causal, scale) - lse[:, :, : q.shape[2], None]).exp()
    d_s = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)) * scale
    return d_s @ k, d_s.mT @ q, p.mT @ d_out, None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_within_1e_6_of_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "FLASH_DEVICES", ())
    monkeypatch.setattr(aten, "_efficient", forward)
    monkeypatch.setattr(aten, "_efficient_backward", backward)
    t = tensors(case)
    found = t.gradients(sink_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window))
    assert max(errors(case, t, found)) <= 2e-6


@pytest.mark.parametrize("window", [None, 1])
def test_the_operators_accept_our_arguments(window: int | None) -> None:
    q, k = (torch.empty(3, heads, 64, 16, device="meta") for heads in (8, 2))
    call = aten.Call((0, 64), (0, 64), causal=window is None, window=window)
    out, lse = aten._forward([q, k, k], call, 0.25)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = aten._backward([out, out, lse, q, k, k], call, 0.25)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
