"""FlexAttention: its blocks hold exactly what the plan shows, and its forward (all that CPU has) is the definition."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, Case, plans, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from sinkflex.attention import flex
from sinkflex.attention.plan import Plan
from sinkflex.attention.reference import reference_attention, visible


def check_blocks(plan: Plan, window: int | None) -> None:
    length = flex.filled_length(len(plan))
    seen = torch.zeros(length, length, dtype=torch.bool)
    seen[: len(plan), : len(plan)] = visible(plan, window)
    tiles = seen.view(length // flex.BLOCK, flex.BLOCK, -1, flex.BLOCK).transpose(1, 2)
    whole, some = (torch.from_numpy(blocks) for blocks in flex.visible_blocks(plan, window))
    assert torch.equal(whole, tiles.all(-1).all(-1))
    assert not (tiles.any(-1).any(-1) & ~some).any(), "a visible block would be skipped"
    assert not (whole & ~some).any()


@settings(max_examples=80, deadline=None)
@given(plan=plans(max_tokens=90), window=st.sampled_from([None, 1, 3, 8, 40]))
def test_blocks_of_any_plan_hold_what_is_visible(plan: Plan, window: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 8)
        check_blocks(plan, window)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_of_every_case_hold_what_is_visible(case: Case) -> None:
    check_blocks(case.plan, case.window)


def test_a_window_visits_a_band_of_blocks() -> None:
    _, some = flex.visible_blocks(Plan.causal(8192), 128)
    assert some.sum() == 2 * (8192 // 128) - 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [case for case in CASES if len(case.plan) <= 300], ids=str)
def test_the_forward_equals_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    t = tensors(case)
    with torch.no_grad():
        out = flex.attention(t.q, t.k, t.v, t.sinks, case.plan, case.window, t.q.shape[-1] ** -0.5)
        exact = reference_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window)
    assert (out - exact).norm() <= 1e-6 * max(exact.norm(), 1.0)


def test_the_factor_is_finite_where_nothing_is_seen() -> None:
    out, lse = torch.zeros(1, 2, 3, 4, requires_grad=True), torch.tensor([[[-torch.inf, 0.0, 5.0]] * 2])
    lse.requires_grad_()
    sinks = torch.tensor([-torch.inf, 1.0], requires_grad=True)
    result = flex.with_sinks(out, lse, sinks)
    result.sum().backward()
    assert all(torch.isfinite(x).all() for x in (result, out.grad, lse.grad, sinks.grad))


def test_lengths_are_filled_up_to_few_sizes() -> None:
    sizes = {flex.filled_length(n) for n in range(1, 8193)}
    assert all(flex.filled_length(n) >= n for n in range(1, 8193))
    assert len(sizes) <= 32 and all(size % flex.BLOCK == 0 for size in sizes)
