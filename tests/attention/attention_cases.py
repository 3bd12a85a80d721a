"""Masks, tensors and error measures that the attention tests share.

Shape letters: H query heads, K key heads, N tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from sinkflex.attention.plan import Plan
from sinkflex.attention.reference import reference_attention


@dataclass(frozen=True)
class Case:
    """One mask with the heads and sinks it is tested with."""

    name: str
    plan: Plan
    window: int | None = None
    heads: tuple[int, int] = (8, 2)
    sink: float | None = None  # the same for all heads; None draws them

    def __repr__(self) -> str:
        return self.name


def answers(prompt: int, lengths: list[int], prefix_tokens: int = 0) -> Plan:
    """Answers that share a prompt."""
    parent = list(range(-1, prompt - 1))
    for length in lengths:
        start = len(parent)
        parent += [prompt - 1, *range(start, start + length - 1)]
    return Plan.tree(parent, prefix_tokens)


def _three_levels() -> Plan:
    """A prompt, 3 first turns below it, 2 second turns below each."""
    parent = list(range(-1, 99))
    for first, second in ((70, 33), (5, 110), (40, 1)):
        start = len(parent)
        parent += [99, *range(start, start + first - 1)]
        above = len(parent) - 1
        for _ in range(2):
            start = len(parent)
            parent += [above, *range(start, start + second - 1)]
    return Plan.tree(parent)


def _padded(left: list[int], right: list[int], width: int = 150) -> Plan:
    mask = np.ones((len(left), width))
    for row, (before, after) in enumerate(zip(left, right, strict=True)):
        mask[row, :before] = 0
        mask[row, width - after :] = 0
    return Plan.padded(mask)


PACKED = [1, 37, 128, 150, 5, 64]
CASES = [
    Case("causal", Plan.causal(450)),
    Case("causal, 8 heads to 1", Plan.causal(321), heads=(8, 1)),
    Case("causal, no grouping", Plan.causal(300), heads=(2, 2)),
    Case("window 1", Plan.causal(300), window=1),
    Case("window 16", Plan.causal(399), window=16),
    Case("window 128", Plan.causal(399), window=128),
    Case("window 128, 8 heads to 1", Plan.causal(448), window=128, heads=(8, 1)),
    Case("window of the length", Plan.causal(300), window=300),
    Case("window above the length", Plan.causal(300), window=4096),
    Case("window 300", Plan.causal(450), window=300),
    Case("window 16 and a visible prefix of 4", Plan.causal(300, prefix_tokens=4), window=16),
    Case("window 64 and a visible prefix of 100", Plan.causal(400, prefix_tokens=100), window=64),
    Case("window 16, prefix and packed", Plan.from_lengths(PACKED, prefix_tokens=8), window=16),
    Case("window 32, prefix and answers", answers(40, [90, 7, 64], prefix_tokens=50), window=32),
    Case("left padding", _padded([0, 50, 149], [0, 0, 0])),
    Case("left padding, window 32", _padded([0, 50, 149], [0, 0, 0]), window=32),
    Case("right padding", _padded([0, 0, 0], [0, 77, 149])),
    Case("both paddings, window 16, an empty row", _padded([10, 0, 150], [20, 120, 0]), window=16),
    Case("packed", Plan.from_lengths(PACKED, tokens=400)),
    Case("packed, window 64", Plan.from_lengths(PACKED, tokens=400), window=64),
    Case("many short documents", Plan.from_lengths(list(range(1, 30)))),
    Case("documents of one length", Plan.from_lengths([260] * 2)),
    Case("shared prompt", answers(200, [70, 70, 31, 1])),
    Case("shared prompt, window 128 below it", answers(200, [70, 140, 31, 1]), window=128),
    Case("shared prompt, window 128 above it", answers(50, [100, 170, 31, 1]), window=128),
    Case("three levels", _three_levels()),
    Case("three levels, window 128", _three_levels(), window=128),
    Case("three levels, window 16", _three_levels(), window=16),
    Case("one visible key", Plan.from_lengths([1] * 40)),
    Case("one visible key, low sinks", Plan.from_lengths([1] * 40), sink=-1.0),
    Case("nothing visible", Plan(np.arange(50))),
    Case("sinks at +1e4", Plan.causal(200), sink=1e4),
    Case("sinks at -1e4", Plan.causal(200), window=16, sink=-1e4),
    Case("sinks at -inf", _padded([0, 50], [20, 0]), sink=-torch.inf),
    Case("sinks at +1e4 with padding", _padded([0, 50], [20, 0]), sink=1e4),
]


@dataclass
class Tensors:
    """Leaves of one attention call, and the gradient of its output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor
    d_out: torch.Tensor

    def gradients(self, out: torch.Tensor) -> list[torch.Tensor]:
        """[out, dq, dk, dv, dsinks]."""
        leaves = (self.q, self.k, self.v, self.sinks)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(out.dtype))]


def tensors(case: Case, size: int = 32, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensors:
    """Random leaves for a case: [1, H, N, D] and [1, K, N, D]."""
    generator = torch.Generator().manual_seed(len(case.plan))
    heads, key_heads = case.heads
    shapes = [(1, h, len(case.plan), size) for h in (heads, key_heads, key_heads, heads)]
    q, k, v, d_out = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    sinks = torch.randn(heads, generator=generator) if case.sink is None else torch.full((heads,), case.sink)
    return Tensors(*(x.requires_grad_() for x in (q, k, v, sinks.to(device))), d_out)


def errors(case: Case, t: Tensors, found: list[torch.Tensor]) -> list[float]:
    """Distance to the float64 definition of [out, dq, dk, dv, dsinks].

    Each is divided by max(norm of the true tensor, norm of dO times the largest rms of q, k, v), since a true gradient
    can be 0; the one of a sink by the sum of its absolute terms over the tokens.
    """
    cpu = Tensors(*(x.detach().cpu().double().requires_grad_() for x in (t.q, t.k, t.v)), None, t.d_out.cpu().double())
    cpu.sinks = t.sinks.detach().cpu().double()[:, None].repeat(1, len(case.plan)).requires_grad_()
    true = cpu.gradients(reference_attention(cpu.q, cpu.k, cpu.v, case.plan, cpu.sinks, window=case.window))
    floor = t.d_out.double().norm() * max(x.detach().double().square().mean().sqrt() for x in (t.q, t.k, t.v))
    measured = []
    for mine, exact in zip(found[:4], true[:4], strict=True):
        measured.append(float((mine.cpu().double() - exact).norm() / max(exact.norm(), floor.cpu(), 1e-30)))
    distance = (found[4].cpu().double() - true[4].sum(1)).abs()
    measured.append(float((distance / true[4].abs().sum(1).clamp(min=1e-30)).max()))
    return measured


@st.composite
def plans(draw: st.DrawFn, max_tokens: int = 60) -> Plan:
    """Any forest with padding anywhere between its trees."""
    parent: list[int] = []
    path: list[int] = []
    padding: list[int] = []
    for token in range(draw(st.integers(1, max_tokens))):
        move = draw(st.sampled_from(["deeper"] * 6 + ["branch"] * 2 + ["root", "padding"]))
        if move == "padding":
            path, padding = [], [*padding, token]
            parent.append(-1)
            continue
        if move == "root":
            path = []
        if move == "branch" and path:
            path = path[: draw(st.integers(1, len(path)))]
        parent.append(path[-1] if path else -1)
        path.append(token)
    ends = Plan.tree(parent).subtree_end.copy()
    ends[padding] = padding
    return Plan(ends, draw(st.sampled_from([0, 0, 1, 5])))
