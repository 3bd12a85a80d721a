"""CUDA back ends against the float64 definition: run with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, Case, errors, tensors
from test_sink_attention import eager_gradients

from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of torch.compile, which here are errors otherwise
]


def measured(case: Case, dtype: torch.dtype, backend: str) -> tuple[list[float], list[float]]:
    """Errors of ours and of eager."""
    t = tensors(case, size=64, dtype=dtype, device="cuda")
    out = sink_attention(t.q, t.k, t.v, case.plan, t.sinks, window=case.window, backend=backend)
    cpu = tensors(case, size=64, dtype=dtype)
    return errors(case, t, t.gradients(out)), errors(case, cpu, eager_gradients(case, cpu))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_pieces_are_within_1e_6_of_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert max(measured(case, torch.float32, "pieces")[0]) <= 1e-6


@pytest.mark.parametrize("backend", ["pieces", "flex"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_close_and_no_worse_than_eager(case: Case, backend: str) -> None:
    # Here the kernel rounds its output before the sink's factor, so that eager may win a little on single tensors.
    ours, eager = measured(case, torch.bfloat16, backend)
    for name, mine, theirs in zip(("out", "dq", "dk", "dv", "dsinks"), ours, eager, strict=True):
        assert mine <= max(1.5 * theirs, 6e-3), f"{name}: {mine:.1e} against eager's {theirs:.1e}"


@pytest.mark.parametrize("backend", ["pieces", "flex"])
def test_one_visible_key_still_moves_queries_and_keys(backend: str) -> None:
    case = Case("one key", Plan.from_lengths([1] * 64))
    t = tensors(case, size=64, dtype=torch.bfloat16, device="cuda")
    gradients = t.gradients(sink_attention(t.q, t.k, t.v, case.plan, t.sinks, backend=backend))
    assert all(x.abs().max() > 0 for x in gradients)


@pytest.mark.parametrize("backend", ["pieces", "flex"])
@pytest.mark.parametrize("window", [None, 128])
def test_memory_is_linear_in_length(backend: str, window: int | None) -> None:
    peaks = []
    for tokens in (4096, 16384):
        q, k, v = (
            torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (64, 8, 8)
        )
        sinks = torch.zeros(64, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sink_attention(q, k, v, Plan.causal(tokens), sinks, window=window, backend=backend).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 4.5 * peaks[0]


def test_float64_is_refused() -> None:
    x = torch.randn(1, 1, 8, 16, device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"no kernel with sinks for torch\.float64 on cuda"):
        sink_attention(x, x, x, Plan.causal(8))
