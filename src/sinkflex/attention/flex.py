"""The paper's path: FlexAttention with a block mask from the plan, and the sink as a factor after it (CUDA).

    out' = out * sigmoid(lse - sink)        lse and the factor in float32; autograd goes through both

The block mask is made from the plan's per-token numbers at the granularity of blocks, never from a token-by-token mask,
and kept for every (plan, window): all layers of a kind share it. Lengths are filled up to a few sizes, so that compiled
kernels are reused; filler tokens see nothing.

Sources: SinkFlex, arXiv 2608.10357 (its mask keeps window + 1 keys; here, as in gpt-oss, it is window). Rounding lse to
bfloat16 before the factor, as some implementations do, costs a factor of 4 in accuracy.

Shape letters: B rows, H query heads, K key heads, T tokens of a row, D head size, N tokens, n blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sinkflex.attention.plan import KEPT, Plan

BLOCK = 128


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, window: int | None, scale: float
) -> Tensor:
    """Attention with sinks; arguments as in `sink.sink_attention`, B * T tokens in one row inside."""
    batch, heads, tokens, size = q.shape
    filled = filled_length(len(plan))
    rows = [x.transpose(0, 1).reshape(1, x.shape[1], -1, size) for x in (q, k, v)]
    rows = [torch.nn.functional.pad(x, (0, 0, 0, filled - len(plan))) for x in rows]
    out, aux = _compiled()(
        *rows,
        block_mask=block_mask(plan, window, q.device),
        scale=scale,
        enable_gqa=heads != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return with_sinks(out, aux.lse, sinks)[0, :, : len(plan)].view(heads, batch, tokens, size).transpose(0, 1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The sink's factor, in float32; 0 where nothing is seen (lse = -inf).

    Args:
        out: [1, H, N, D].
        lse: [1, H, N] natural logarithm, float32.
        sinks: [H].
    """
    nothing = lse == -torch.inf
    if sinks is None:
        return out.masked_fill(nothing[..., None], 0.0)
    factor = torch.sigmoid(lse.float().masked_fill(nothing, 0.0) - sinks.float()[:, None])
    return (out.float() * factor.masked_fill(nothing, 0.0)[..., None]).to(out.dtype)


def filled_length(tokens: int) -> int:
    """The next of a few lengths: multiples of a block in eighths of a power of two."""
    step = max(BLOCK, 2 ** max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """Uncompiled, FlexAttention would form all scores."""
    return torch.compile(flex_attention)


@lru_cache(maxsize=KEPT)
def block_mask(plan: Plan, window: int | None, device: torch.device) -> BlockMask:
    """The mask of a plan, with the blocks that are visible in full and in part."""
    whole, some = visible_blocks(plan, window)
    length = filled_length(len(plan))
    end = torch.from_numpy(_filled(plan.subtree_end, np.arange(length))).to(device)
    position = torch.from_numpy(_filled(plan.position, np.zeros(length, dtype=np.int64))).to(device)
    prefix = plan.prefix_tokens

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key <= query) & (query < end[key])
        if window is None:
            return visible
        return visible & ((position[query] - position[key] < window) | (position[key] < prefix))

    blocks = [_listed(kind).to(device)[None, None] for kind in (some & ~whole, whole)]
    counts = [torch.from_numpy(kind.sum(1).astype(np.int32)).to(device)[None, None] for kind in (some & ~whole, whole)]
    return BlockMask.from_kv_blocks(
        counts[0], blocks[0], counts[1], blocks[1], BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def visible_blocks(plan: Plan, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[n, n] bool each: query block x key block visible in full, and (a few more than) those visible at all.

    Per block only the least and greatest index, subtree end and position are needed.
    """
    length = filled_length(len(plan))
    index = np.arange(length).reshape(-1, BLOCK)
    end = _filled(plan.subtree_end, np.arange(length)).reshape(-1, BLOCK)
    position = _filled(plan.position, np.zeros(length, dtype=np.int64)).reshape(-1, BLOCK)
    first, last = index[:, 0], index[:, -1]
    whole = (last[None] <= first[:, None]) & (last[:, None] < end.min(1)[None])
    some = (first[None] <= last[:, None]) & (np.maximum(first[:, None], first[None]) < end.max(1)[None])
    if window is not None:
        farthest = position.max(1)[:, None] - position.min(1)[None]
        nearest = position.min(1)[:, None] - position.max(1)[None]
        whole &= (farthest < window) | (position.max(1) < plan.prefix_tokens)[None]
        some &= (nearest < window) | (position.min(1) < plan.prefix_tokens)[None]
    return whole, some


def _filled(values: np.ndarray, filler: np.ndarray) -> np.ndarray:
    return np.concatenate([values, filler[len(values) :]])


def _listed(blocks: np.ndarray) -> Tensor:
    """[n, n] bool to int32 indices, the visible ones of each row first."""
    return torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32))
