"""`sink_attention` against its float64 definition, eager attention, finite differences and a byte budget."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from attention_cases import CASES, Case, Tensors, errors, plans, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sinkflex.attention import aten
from sinkflex.attention.plan import Plan
from sinkflex.attention.reference import reference_attention, visible
from sinkflex.attention.sink import sink_attention


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_within_1e_6_of_float64(case: Case) -> None:
    t = tensors(case)
    found = t.gradients(sink_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window))
    assert all(torch.isfinite(x).all() for x in found)
    assert max(errors(case, t, found)) <= 1e-6


def eager_gradients(case: Case, t: Tensors) -> list[torch.Tensor]:
    """[out, dq, dk, dv, dsinks] of transformers' eager GptOss attention, with padding rows set to 0."""
    module = SimpleNamespace(num_key_value_groups=case.heads[0] // case.heads[1], sinks=t.sinks.to(t.q), training=True)
    mask = torch.zeros(1, 1, len(case.plan), len(case.plan), dtype=t.q.dtype)
    mask.masked_fill_(~visible(case.plan, case.window), torch.finfo(t.q.dtype).min)
    out = eager_attention_forward(module, t.q, t.k, t.v, mask, t.q.shape[-1] ** -0.5)[0].transpose(1, 2)
    return t.gradients(out.masked_fill(~visible(case.plan).any(1)[:, None], 0.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_never_worse_than_eager(case: Case) -> None:
    t = tensors(case, dtype=torch.bfloat16)
    mine = errors(case, t, t.gradients(sink_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window)))
    eager = errors(case, t, eager_gradients(case, t))
    for name, ours, theirs in zip(("out", "dq", "dk", "dv", "dsinks"), mine, eager, strict=True):
        assert ours <= theirs, f"{name}: {ours:.1e} against eager's {theirs:.1e}"


@settings(max_examples=30, deadline=None)
@given(plan=plans(), window=st.sampled_from([None, 1, 3, 8, 40]), seed=st.integers(0, 99))
def test_any_plan_and_any_order_of_pieces(plan: Plan, window: int | None, seed: int) -> None:
    case = Case("any", plan, window, heads=(4, 2))
    t = tensors(case, size=8)
    calls = list(aten._calls(plan, window, torch.device("cpu")))
    random.Random(seed).shuffle(calls)
    calls.sort(key=lambda call: not call.first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten, "_calls", lambda *_: calls)
        found = t.gradients(sink_attention(t.q, t.k, t.v, plan, t.sinks, window=window))
    *others, of_sinks = errors(case, t, found)
    assert max(others) <= 1e-6
    assert of_sinks <= 1e-5  # with a single token, its term itself may cancel


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_equal_finite_differences(window: int | None) -> None:
    plan = Plan.tree([-1, 0, 1, 2, 3, 2, 5, 6, -1, 8])
    q, k, v = (torch.randn(1, heads, 10, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    call = lambda *leaves: sink_attention(*leaves[:3], plan, leaves[3], window=window)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


def test_one_visible_key_still_moves_queries_and_keys() -> None:
    # A kernel without gradient through its log-sum-exp gives 0 here. By hand: out = sigmoid(q k - sink) v.
    q, k, v, sinks = (torch.tensor(x, requires_grad=True) for x in (0.5, 2.0, 3.0, [1.0]))
    as_4d = [x.view(1, 1, 1, 1).expand(1, 1, 1, 4) * torch.tensor([1.0, 0, 0, 0]) for x in (q, k, v)]
    out = sink_attention(*as_4d, Plan.causal(1), sinks, scale=1.0)[0, 0, 0, 0]
    d_q, d_k, d_v, d_sink = torch.autograd.grad(out, (q, k, v, sinks))
    # sigmoid(0) = 1/2 and its slope 1/4: dq = 1/4 k v, dk = 1/4 q v, dv = 1/2, dsink = -1/4 v
    for gradient, by_hand in ((d_q, 1.5), (d_k, 0.375), (d_v, 0.5), (d_sink, -0.75)):
        assert gradient.item() == pytest.approx(by_hand, abs=1e-6)


def test_sinks_at_minus_infinity_are_plain_softmax() -> None:
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    plan = Plan.causal(100)
    with_sinks = sink_attention(q, k, v, plan, torch.full((2,), -torch.inf))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(with_sinks, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sink_attention(q, k, v, plan), plain, rtol=1e-5, atol=1e-6)


def test_rows_of_a_batch_equal_the_rows_alone() -> None:
    q, k, v = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    together = sink_attention(q, k, v, Plan.from_lengths([50, 50]), sinks, window=20)
    for row in range(2):
        alone = sink_attention(*(x[row : row + 1] for x in (q, k, v)), Plan.causal(50), sinks, window=20)
        torch.testing.assert_close(together[row : row + 1], alone)


def test_a_high_log_sum_exp_loses_nothing_in_bfloat16() -> None:
    # A log-sum-exp in [8, 16) rounded to bfloat16 has steps of 1/16, which go through exp().
    q, k = torch.full((1, 1, 256, 16), 1.5), torch.full((1, 1, 256, 16), 1.2)
    q, k, v = (x.bfloat16() + torch.randn(1, 1, 256, 16).bfloat16() / 8 for x in (q, k, torch.zeros(1, 1, 256, 16)))
    plan, sinks = Plan.causal(256), torch.tensor([10.0])
    lse = torch.logsumexp((q.double() @ k.double().transpose(2, 3) / 4).masked_fill(~visible(plan), -torch.inf), -1)
    assert lse[0, 0, 64:].min() >= 8 and lse.max() < 16
    exact = reference_attention(q, k, v, plan, sinks)
    error = (sink_attention(q, k, v, plan, sinks).double() - exact).norm() / exact.norm()
    assert error < 3e-3


@pytest.mark.parametrize("window", [None, 128])
def test_saved_bytes_stay_within_the_linear_bound(window: int | None) -> None:
    heads, key_heads, size, tokens = 8, 2, 64, 2048
    q, k, v = (torch.randn(1, h, tokens, size, requires_grad=True) for h in (heads, key_heads, key_heads))
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        sink_attention(q, k, v, Plan.causal(tokens), torch.zeros(heads, requires_grad=True), window=window)
    assert sum(saved.values()) <= (2 * size * (heads + key_heads) + heads) * 4 * tokens * 1.01
    assert max(saved.values()) <= heads * size * tokens * 4


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("window", [None, 128, 1500])
@pytest.mark.parametrize("lengths", [[4096], [1500, 600, 1996], [40] * 100])
def test_no_operator_makes_a_tensor_above_the_linear_bound(window: int | None, lengths: list[int]) -> None:
    tokens = sum(lengths)
    q, k, v = (torch.randn(1, h, tokens, 16, requires_grad=True) for h in (4, 2, 2))
    with LargestTensor() as largest:
        sink_attention(q, k, v, Plan.from_lengths(lengths), torch.zeros(4), window=window).sum().backward()
    assert largest.bytes <= 4 * 16 * 4 * tokens * 2  # q is 4 heads x 16 x 4 bytes a token; a mask would be N x N x 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.randn(2, 8, 16)), "expected q \\[B, H, T, D\\]"),
        (dict(v=torch.randn(1, 2, 8, 12)), "expected q \\[B, H, T, D\\]"),
        (dict(q=torch.randn(1, 3, 8, 16)), "3 query heads over 2"),
        (dict(plan=Plan.causal(9)), "describes 9 tokens; expected B \\* T = 8"),
        (dict(k=torch.randn(1, 2, 8, 16).double()), "expected one dtype"),
        (dict(sinks=torch.randn(3)), "one per query head"),
        (dict(window=0), "window is 0"),
        (dict(backend="flexx"), "expected one of pieces, flex; did you mean 'flex'"),
        (dict(backend="flex"), "no backward on cpu; use backend='pieces'"),
    ],
)
def test_mistakes_are_told(change: dict, message: str) -> None:
    arguments = dict(q=torch.randn(1, 4, 8, 16), k=torch.randn(1, 2, 8, 16), v=torch.randn(1, 2, 8, 16))
    with pytest.raises(ValueError, match=message):
        sink_attention(**{**arguments, "plan": Plan.causal(8), "sinks": torch.zeros(4), **change})
