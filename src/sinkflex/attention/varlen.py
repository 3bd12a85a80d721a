"""Pieces on CUDA's variable-length flash operator, for half precision: one call a level instead of one a rectangle.

The operator takes queries and keys of many sequences end to end, with a different number of keys than queries each,
causal from the bottom right corner, with a window: which is what a piece is. So all pieces that start their tokens are
one call, and the ones that merge are one call a level, pieces of a level having no query in common. Its backward takes
(O, LSE), so that sinks need no change to the kernel. No extra package is used, and Ampere cards are enough.

Shape letters: N tokens, H query heads, K key heads, D head size, Q queries and S keys of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from sinkflex.attention.plan import KEPT, Piece, Plan

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, slots=True)
class Call:
    """Pieces end to end.

    Attributes:
        queries: [Q] int64 tokens.
        keys: [S] int64 tokens; one may be in several pieces.
        query_bounds: [pieces + 1] int32 where each piece starts.
        key_bounds: [pieces + 1] int32.
        most_queries: of one piece.
        most_keys: of one piece.
        causal: bottom-right aligned.
        window: with `causal`, keys a query sees at most.
        first: the results start these tokens, otherwise they merge.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    most_queries: int
    most_keys: int
    causal: bool
    window: int | None
    first: bool


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without sinks.

    Args:
        q: [N, H, D] float16 or bfloat16, on CUDA.
        k: [N, K, D].
        v: [N, K, D].

    Returns:
        out [N, H, D] and log-sum-exp [N, H], both float32; both 0 for padding.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    for call in _calls(plan, window, q.device):
        part, part_lse, *_ = _forward(
            _padded(q[call.queries]), _padded(k[call.keys]), _padded(v[call.keys]), *_shape(call),
            0.0, call.causal, False, scale=scale, **_window(call),
        )  # fmt: skip
        part, part_lse = part[..., : q.shape[2]].float(), part_lse.T
        if not call.first:
            before, mine = lse[call.queries], out[call.queries]
            joint = torch.logaddexp(before, part_lse)
            part = mine * (before - joint).exp()[..., None] + part * (part_lse - joint).exp()[..., None]
            part_lse = joint
        out.index_copy_(0, call.queries, part)
        lse.index_copy_(0, call.queries, part_lse.contiguous())
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
    """Gradients of q, k, v in float32, given the out (half) and log-sum-exp of the whole rows (sink included)."""
    grads = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    for call in _calls(plan, window, q.device):
        of_queries = [_padded(x[call.queries]) for x in (d_out, q, out)]
        of_keys = [_padded(x[call.keys]) for x in (k, v)]
        parts = _backward(
            of_queries[0], of_queries[1], *of_keys, of_queries[2], lse[call.queries].T.contiguous(), *_shape(call),
            0.0, call.causal, *no_dropout, scale=scale, **_window(call),
        )  # fmt: skip
        for grad, part, tokens in zip(grads, parts, (call.queries, call.keys, call.keys), strict=True):
            grad.index_add_(0, tokens, part[..., : q.shape[2]].float())
    return grads


def _shape(call: Call) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return call.query_bounds, call.key_bounds, call.most_queries, call.most_keys


def _window(call: Call) -> dict[str, int]:
    """The operator counts the keys before a query's own."""
    return {"window_size_left": -1 if call.window is None else call.window - 1, "window_size_right": -1 + call.causal}


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Head size to a multiple of 8."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x.contiguous()


@lru_cache(maxsize=KEPT)
def _calls(plan: Plan, window: int | None, device: torch.device) -> tuple[Call, ...]:
    """Pieces by level: those that start their tokens, then each one after the last that it shares a query with."""
    level = np.zeros(len(plan), dtype=np.int64)  # of the last piece of each token
    found: dict[tuple[int, bool, int | None], list[Piece]] = {}
    for piece in plan.pieces(window):
        mine = int(level[piece.start : piece.stop].max()) + 1
        level[piece.start : piece.stop] = mine
        found.setdefault((mine, piece.causal, piece.window), []).append(piece)
    return tuple(_call(found[key], device) for key in sorted(found, key=lambda key: (key[0], key[1])))


def _call(pieces: list[Piece], device: torch.device) -> Call:
    queries = [np.arange(piece.start, piece.stop) for piece in pieces]
    keys = [np.concatenate([np.arange(*span) for span in piece.keys]) for piece in pieces]
    tensors = []
    for tokens in (queries, keys):
        tensors.append(torch.from_numpy(np.concatenate(tokens)).to(device))
        bounds = np.cumsum([0, *map(len, tokens)])
        tensors.append(torch.from_numpy(bounds.astype(np.int32)).to(device))
    return Call(
        queries=tensors[0],
        keys=tensors[2],
        query_bounds=tensors[1],
        key_bounds=tensors[3],
        most_queries=max(map(len, queries)),
        most_keys=max(map(len, keys)),
        causal=pieces[0].causal,
        window=pieces[0].window,
        first=pieces[0].first,
    )
