"""Pieces as batches of equal rectangles on ATen's fused operators, which return (O, LSE) and whose backward takes them.

The operator is the flash operator on CPU, and on CUDA the efficient one, which computes float32.

The backward of every piece is called with the O and LSE of the whole row, sink included. The operator only forms
P = exp(score - LSE) and D = rowsum(dO * O), so that its partial dq, dk, dv are exact and simply add.

A plan becomes a short list of calls of three kinds, each a batch of equal rectangles gathered by index:

    window blocks    C queries x (C + window - 1) keys; all blocks of all documents share one small mask
    causal squares   documents, or the first window - 1 tokens of one; short ones are padded at the end
    unmasked         tokens below a branching point x the shared tokens above it

A batch can hold rows that fill it up only. They are dropped from the output, and in the backward their dO is 0 and
their LSE is infinite, so that they add nothing.

Shape letters: N tokens, H query heads, K key heads, D head size, C block, n rectangles, R queries and S keys of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from sinkflex.attention.plan import KEPT, Piece, Plan, Span

FLASH_DEVICES = ("cpu",)  # the others run the efficient operator
BLOCK = 64  # queries of a window block: from window / 2 to window was the quickest
BATCH_KEYS = 4096  # bounds the copies of one call
LONG = 256  # squares above this length are not padded to share a call

_efficient = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call.

    Attributes:
        queries: a span of tokens, or indices [n, R].
        keys: a span of tokens, or indices [n, S].
        causal: query r sees keys 0 to r.
        window: width of the shared mask of window blocks.
        shown: flat indices of the rows of [n * R] to keep, and their tokens; None for all.
        filler: flat indices of the other rows.
        first: the results start these tokens, otherwise they merge.
    """

    queries: Span | torch.Tensor
    keys: Span | torch.Tensor
    causal: bool = False
    window: int | None = None
    shown: tuple[torch.Tensor, torch.Tensor] | None = None
    filler: torch.Tensor | None = None
    first: bool = True


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without sinks.

    Args:
        q: [N, H, D] float32, or float64 on CPU.
        k: [N, K, D].
        v: [N, K, D].

    Returns:
        out [N, H, D] and log-sum-exp [N, H]; both 0 for padding.
    """
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_zeros(q.shape[:2])
    for call in _calls(plan, window, q.device):
        rows = [_take(x, index) for x, index in ((q, call.queries), (k, call.keys), (v, call.keys))]
        part, part_lse = _forward([x.transpose(1, 2) for x in rows], call, scale)
        part, part_lse = part.transpose(1, 2), part_lse.transpose(1, 2)
        if call.first:
            _put(out, call, part)
            _put(lse, call, part_lse)
        else:
            _merge(out, lse, call, part[0], part_lse[0])
    return out, lse


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: Plan,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, given the out and log-sum-exp of the whole rows (sink included)."""
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for call in _calls(plan, window, q.device):
        rows = [_take(x, call.queries) for x in (d_out, out, lse, q)]
        if call.filler is not None:
            rows[0].view(-1, *d_out.shape[1:]).index_fill_(0, call.filler, 0.0)
            rows[2].view(-1, *lse.shape[1:]).index_fill_(0, call.filler, torch.inf)
        rows += [_take(x, call.keys) for x in (k, v)]
        parts = _backward([x.transpose(1, 2) for x in rows], call, scale)
        for grad, part, index in zip(grads, parts, (call.queries, call.keys, call.keys), strict=True):
            _add(grad, index, part.transpose(1, 2))
    return grads


def _forward(qkv: list[torch.Tensor], call: Call, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator: q [n, H, R, D], k and v [n, K, S, D] to out [n, H, R, D] and log-sum-exp [n, H, R]."""
    q, k, v = qkv
    mask = _window_mask(call.window, q.dtype, q.device)
    if q.device.type in FLASH_DEVICES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, call.causal, attn_mask=mask, scale=scale)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    mask = None if mask is None else mask.expand(*q.shape[:2], *mask.shape)
    out, lse, *_ = _efficient(q, k, v, mask, True, 0.0, call.causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _backward(rows: list[torch.Tensor], call: Call, scale: float) -> tuple[torch.Tensor, ...]:
    """Its backward: d_out, out, log-sum-exp, q, k, v to d_q, d_k, d_v."""
    d_out, out, lse, q, k, v = rows
    mask = _window_mask(call.window, q.dtype, q.device)
    if q.device.type in FLASH_DEVICES:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(d_out, q, k, v, out, lse, 0.0, call.causal, attn_mask=mask, scale=scale)
    key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = None if mask is None else mask.expand(*q.shape[:2], *mask.shape)
    # The operator wants whole tiles, and reads the log-sum-exp as if it were contiguous.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
    seed = torch.zeros((), dtype=torch.long, device=q.device)  # of dropout, which there is none of
    wanted = [True, True, True, False]
    d_q, *d_kv, _ = _efficient_backward(
        d_out, q, k, v, mask, out, lse, seed, seed, 0.0, wanted, call.causal, scale=scale
    )
    return d_q, *(x.unflatten(1, (key_heads, group)).sum(2) for x in d_kv)


def _take(x: torch.Tensor, rows: Span | torch.Tensor) -> torch.Tensor:
    """Tokens [N, ...] to [n, rows, ...]; a view for a span."""
    if isinstance(rows, tuple):
        return x[None, rows[0] : rows[1]]
    return x.index_select(0, rows.view(-1)).view(*rows.shape, *x.shape[1:])


def _put(x: torch.Tensor, call: Call, part: torch.Tensor) -> None:
    if isinstance(call.queries, tuple):
        x[call.queries[0] : call.queries[1]] = part[0]
        return
    part = part.reshape(-1, *x.shape[1:])
    if call.shown is None:
        x.index_copy_(0, call.queries.view(-1), part)
    else:
        x.index_copy_(0, call.shown[1], part.index_select(0, call.shown[0]))


def _add(x: torch.Tensor, rows: Span | torch.Tensor, part: torch.Tensor) -> None:
    if isinstance(rows, tuple):
        x[rows[0] : rows[1]] += part[0]
    else:
        x.index_add_(0, rows.view(-1), part.reshape(-1, *x.shape[1:]))


def _merge(out: torch.Tensor, lse: torch.Tensor, call: Call, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Weight two partial softmaxes of the same rows by their shares of the joint one, in place."""
    if isinstance(call.queries, tuple):
        rows = slice(*call.queries)
        before, mine = lse[rows], out[rows]
    else:
        kept = call.shown[1] if call.shown else call.queries.view(-1)
        if call.shown:
            part, part_lse = part.index_select(0, call.shown[0]), part_lse.index_select(0, call.shown[0])
        before, mine = lse.index_select(0, kept), out.index_select(0, kept)
    joint = torch.logaddexp(before, part_lse)
    mine.mul_((before - joint).exp_()[..., None]).addcmul_(part, (part_lse - joint).exp_()[..., None])
    if isinstance(call.queries, tuple):
        before.copy_(joint)
    else:
        out.index_copy_(0, kept, mine)
        lse.index_copy_(0, kept, joint)


@lru_cache(maxsize=16)
def _window_mask(window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """[C, C + window - 1]: query r of a block sees the `window` keys from r on. Rows are aligned for CUDA."""
    if window is None:
        return None
    keys = BLOCK + window - 1
    ahead = torch.arange(keys + -keys % 16, device=device) - torch.arange(BLOCK, device=device)[:, None]
    mask = torch.zeros(ahead.shape, dtype=dtype, device=device)
    return mask.masked_fill_((ahead < 0) | (ahead >= window), -torch.inf)[:, :keys]


@lru_cache(maxsize=KEPT)
def _calls(plan: Plan, window: int | None, device: torch.device) -> tuple[Call, ...]:
    """Lower the pieces of a plan: first the calls that start every token, then the ones that merge."""
    if device.type != "cpu":
        return tuple(_moved(call, device) for call in _calls(plan, window, torch.device("cpu")))
    blocks: list[_Rectangle] = []
    squares: dict[int, list[_Rectangle]] = {}  # by padded length
    later: list[Call] = []
    for piece in plan.pieces(window):
        path = np.concatenate([np.arange(*span) for span in piece.keys])
        above = len(path) - (piece.stop - piece.start)  # keys that are not queries
        if not piece.first:
            later += _later_calls(piece, path, above)
            continue
        square = len(path)
        if piece.window is not None and square > piece.window:
            square = piece.window - 1
            for start in range(square, len(path), BLOCK):
                tokens = _filled(path[start - square : start + BLOCK], square + BLOCK)
                blocks.append(_Rectangle(tokens[square:], tokens, 0, min(BLOCK, len(path) - start)))
        if square > above:
            tokens = _filled(path[:square], square if square > LONG else -(-square // 32) * 32)
            squares.setdefault(len(tokens), []).append(_Rectangle(tokens, tokens, above, square))
    calls = [call for group in squares.values() for call in _batched(group, causal=True)]
    return (*calls, *_batched(blocks, window=window), *later)


def _moved(call: Call, device: torch.device) -> Call:
    queries, keys = (x if isinstance(x, tuple) else x.to(device) for x in (call.queries, call.keys))
    shown = None if call.shown is None else (call.shown[0].to(device), call.shown[1].to(device))
    filler = None if call.filler is None else call.filler.to(device)
    return replace(call, queries=queries, keys=keys, shown=shown, filler=filler)


def _later_calls(piece: Piece, path: np.ndarray, above: int) -> list[Call]:
    """Calls whose results merge. A causal one becomes a square whose first rows are filler."""
    if not piece.causal:
        keys = piece.keys[0] if len(piece.keys) == 1 else torch.from_numpy(path)[None]
        return [Call((piece.start, piece.stop), keys, first=False)]
    queries = np.concatenate([np.full(above, piece.start), np.arange(piece.start, piece.stop)])
    return _batched([_Rectangle(queries, path, above, len(path))], causal=True, first=False)


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Queries and keys by token; rows outside [shown_start, shown_stop) are filler."""

    queries: np.ndarray
    keys: np.ndarray
    shown_start: int
    shown_stop: int


def _filled(path: np.ndarray, length: int) -> np.ndarray:
    """The path with its last token repeated up to `length`; no real query sees a repeated one."""
    return np.pad(path, (0, length - len(path)), mode="edge")


def _batched(
    group: list[_Rectangle], causal: bool = False, window: int | None = None, first: bool = True
) -> list[Call]:
    """Calls of a bounded number of rectangles of one shape."""
    calls = []
    size = max(1, BATCH_KEYS // len(group[0].keys)) if group else 1
    for batch in (group[i : i + size] for i in range(0, len(group), size)):
        queries, keys = (np.stack([getattr(r, side) for r in batch]) for side in ("queries", "keys"))
        row = np.arange(queries.shape[1])
        shown = np.stack([(row >= r.shown_start) & (row < r.shown_stop) for r in batch]).reshape(-1)
        if shown.all():
            calls.append(Call(_rows(queries), _rows(keys), causal, window, first=first))
            continue
        kept = torch.from_numpy(np.flatnonzero(shown)), torch.from_numpy(queries.reshape(-1)[shown])
        filler = torch.from_numpy(np.flatnonzero(~shown))
        calls.append(Call(torch.from_numpy(queries), torch.from_numpy(keys), causal, window, kept, filler, first))
    return calls


def _rows(tokens: np.ndarray) -> Span | torch.Tensor:
    """Indices, or a span for one rectangle of neighboring tokens."""
    if len(tokens) == 1 and (np.diff(tokens[0]) == 1).all():
        return int(tokens[0, 0]), int(tokens[0, -1]) + 1
    return torch.from_numpy(tokens)
