"""FlexAttention: its blocks hold exactly what the plan shows, and its forward (all that CPU has) is the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import CASES, Case, errors, plans, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

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
@pytest.mark.parametrize("case", [case for case in CASES if len(case.plan) <= 300][::4], ids=str)
def test_the_forward_equals_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    t = tensors(case)
    with torch.no_grad():
        out = flex.attention(t.q, t.k, t.v, t.sinks, case.plan, case.window, t.q.shape[-1] ** -0.5)
        exact = reference_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window)
    assert (out - exact).norm() <= 1e-6 * max(exact.norm(), 1.0)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_torch_finds_the_same_blocks(case: Case) -> None:
    mine = flex.block_mask(case.plan, case.window, torch.device("cpu"))
    length = flex.filled_length(len(case.plan))
    theirs = create_block_mask(mine.mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=flex.BLOCK)
    for side in ("kv", "q"):
        mine_full, theirs_full, mine_some, theirs_some = (
            listed(getattr(mask, f"{kind}{side}_num_blocks"), getattr(mask, f"{kind}{side}_indices"))
            for kind in ("full_", "")
            for mask in (mine, theirs)
        )
        assert mine_full == theirs_full
        assert all(some >= true for some, true in zip(mine_some, theirs_some, strict=True))


def listed(counts: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    return [set(row[:n].tolist()) for n, row in zip(counts.flatten(), indices.flatten(0, -2), strict=True)]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool,
    return_aux: AuxRequest,
) -> tuple[torch.Tensor, AuxOutput]:  # fmt: skip
    """What FlexAttention computes, with the backward that it has on CUDA only, gradient through lse included."""
    assert return_aux.lse and enable_gqa == (q.shape[1] != k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    seen = create_mask(block_mask.mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
    s = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    nothing = ~seen.any(-1, keepdim=True)
    weights = s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    lse = s.masked_fill(nothing, 0.0).logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)
    return weights @ v, AuxOutput(lse=lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_backward_around_the_kernel_is_exact(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: dense)
    t = tensors(case)
    found = t.gradients(flex.attention(t.q, t.k, t.v, t.sinks, case.plan, case.window, t.q.shape[-1] ** -0.5))
    assert all(torch.isfinite(x).all() for x in found)
    assert max(errors(case, t, found)) <= 3e-6


@pytest.mark.slow  # a minute of compiling
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["shared prompt, window 128 below it", "packed"])
def test_the_compiled_kernel_walks_the_listed_blocks(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    t, length = tensors(case), flex.filled_length(len(case.plan))
    rows = [torch.nn.functional.pad(x.detach(), (0, 0, 0, length - len(case.plan))) for x in (t.q, t.k, t.v)]
    mask = flex.block_mask(case.plan, case.window, torch.device("cpu"))
    with torch.no_grad():
        out = torch.compile(flex_attention)(*rows, block_mask=mask, enable_gqa=True)[:, :, : len(case.plan)]
    exact = reference_attention(t.q, t.k, t.v, case.plan, window=case.window).detach()
    real = torch.from_numpy(case.plan.subtree_end > np.arange(len(case.plan)))
    assert (out - exact)[:, :, real].norm() <= 1e-6 * exact.norm()


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
