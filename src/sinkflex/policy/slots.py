"""Key-value slots for sampling: one slot a live conversation, kept across its turns, attended in place.

A tick runs one forward pass over a flat list of new tokens: first one token for each decoding slot, then the prompt
tokens of each prefilling slot. Linear layers see all of them as one matrix; attention splits them again.

Shape letters: S slots, N tokens of the tick, R prefilling rows, T padded prompt tokens, L cached tokens, H heads,
H_kv key-value heads, g = H / H_kv, W window, M slot capacity, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_BUCKET = 64


@dataclass(slots=True)
class Tick:
    """Where the N tokens of one forward pass live.

    Attributes:
        slot, position: [N] int64 place of each token; the first `decoding` tokens are one a decoding slot.
        decoding: number of decoding tokens.
        rows: (offset, length) of each prefilling row inside the N tokens.
        span: number of leading slots that hold anything.
        length: cached tokens to look at, a multiple of LENGTH_BUCKET.
    """

    slot: Tensor
    position: Tensor
    decoding: int
    rows: list[tuple[int, int]]
    span: int
    length: int


class SlotCache:
    """Keys and values of every slot and layer, and attention with sinks over them.

    Args:
        layers, kv_heads, head_dim: the model's shape.
        slots: number of conversations held at once.
        capacity: tokens a slot can hold.
        device, dtype: where and how keys and values are stored.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        capacity = -(-capacity // LENGTH_BUCKET) * LENGTH_BUCKET
        shape = (slots, kv_heads, capacity, head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.capacity = capacity
        self._tick: Tick | None = None
        self._masks: dict[tuple[str, int | None], Tensor] = {}

    def begin(self, tick: Tick) -> None:
        """Announce the tokens of the next forward pass."""
        self._tick = tick
        self._masks = {}

    def copy(self, source: int, target: int, stop: int, start: int = 0) -> None:
        """Copy tokens [start, stop) of one slot into another."""
        for cache in (*self.keys, *self.values):
            cache[target, :, start:stop] = cache[source, :, start:stop]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int | None
    ) -> Tensor:
        """Store the tick's keys and values and return attention outputs.

        Args:
            layer: layer index.
            q: [1, H, N, D]; k, v: [1, H_kv, N, D], already rotated.
            sinks: [H] learned sink logits or None.
            scale: factor on q.k.
            window: visible keys, the query's own included; None for all.

        Returns:
            [1, N, H, D].
        """
        tick = self._tick
        assert tick is not None
        keys, values = self.keys[layer], self.values[layer]
        keys[tick.slot, :, tick.position] = k[0].transpose(0, 1)
        values[tick.slot, :, tick.position] = v[0].transpose(0, 1)
        out = torch.empty_like(q[0].transpose(0, 1))
        if tick.decoding:
            queries = q[0, :, : tick.decoding].transpose(0, 1)
            out[: tick.decoding] = self._decode(tick, queries, keys, values, sinks, scale, window)
        if tick.rows:
            self._prefill(tick, q[0], keys, values, sinks, scale, window, out)
        return out[None]

    def _decode(
        self,
        tick: Tick,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """One query a slot, the heads that share keys packed as query rows: q is [S, H, D]."""
        n, heads, size = q.shape
        kv_heads = keys.shape[1]
        slot, position = tick.slot[:n], tick.position[:n]
        if window is not None and window < tick.length:
            index = position[:, None] - torch.arange(window - 1, -1, -1, device=q.device)
            seen = index >= 0
            index = index.clamp(min=0)
            k = keys[slot[:, None], :, index].transpose(1, 2)
            v = values[slot[:, None], :, index].transpose(1, 2)
            mask = _additive(seen, q.dtype)[:, None, None, :]
            out = _attend(q.view(n, kv_heads, heads // kv_heads, size), k, v, mask, sinks, scale)
            return out.reshape(n, heads, size)
        mask = self._masks.get(("decode", window))
        if mask is None:
            seen = torch.zeros(tick.span, tick.length, dtype=torch.bool, device=q.device)
            at = torch.arange(tick.length, device=q.device)
            low = -1 if window is None else position[:, None] - window
            seen[slot] = (at <= position[:, None]) & (at > low)
            mask = self._masks["decode", window] = _additive(seen, q.dtype)[:, None, None, :]
        spread = q.new_zeros(tick.span, heads, size)
        spread[slot] = q
        out = _attend(
            spread.view(tick.span, kv_heads, heads // kv_heads, size),
            keys[: tick.span, :, : tick.length],
            values[: tick.span, :, : tick.length],
            mask,
            sinks,
            scale,
        )
        return out.reshape(tick.span, heads, size)[slot]

    def _prefill(
        self,
        tick: Tick,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Prompt tokens of R slots, padded to the longest: q is [H, N, D], out [N, H, D] is filled in place."""
        longest = max(length for _, length in tick.rows)
        offsets = torch.tensor([offset for offset, _ in tick.rows], device=q.device)
        lengths = torch.tensor([length for _, length in tick.rows], device=q.device)
        inside = torch.arange(longest, device=q.device)
        real = inside < lengths[:, None]
        source = torch.where(real, offsets[:, None] + inside, offsets[:, None])
        slots = tick.slot[offsets]
        start = tick.position[offsets]
        seen_keys = int((start + lengths).max())
        if window is not None and window + longest < seen_keys:
            # A window layer needs the new tokens and the window - 1 keys before them.
            at = start[:, None] + torch.arange(1 - window, longest, device=q.device)
            k, v = (x[slots[:, None], :, at.clamp(min=0, max=x.shape[2] - 1)].transpose(1, 2) for x in (keys, values))
        else:
            at = torch.arange(seen_keys, device=q.device)[None]
            k, v = keys[slots, :, :seen_keys], values[slots, :, :seen_keys]
        mask = self._masks.get(("prefill", window))
        if mask is None:
            position = (start[:, None] + inside)[:, :, None]
            seen = (at[:, None] >= 0) & (at[:, None] <= position) & real[:, :, None]
            if window is not None:
                seen &= at[:, None] > position - window
            mask = self._masks["prefill", window] = _additive(seen, q.dtype)[:, None]
        heads, kv_heads = q.shape[0], keys.shape[1]
        if kv_heads != heads and not _flash(q):
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        rows = q[:, source].transpose(0, 1)
        result = _attend(rows, k, v, mask, None if sinks is None else sinks.view(heads, 1), scale)
        out[source[real]] = result.transpose(1, 2)[real]


def _flash(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """Masked attention of q [B, h, n, D] over k, v [B, h_kv, L, D]; `sinks` reshapes to [h, n or 1]."""
    if _flash(q):
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = op(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    else:
        scores = (q @ k.transpose(-1, -2)).float() * scale + mask
        lse = scores.logsumexp(-1)
        out = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(q.dtype) @ v
    if sinks is None:
        return out
    per_row = sinks.view(1, q.shape[1], -1)
    return (out.float() * torch.sigmoid(lse.float() - per_row.float())[..., None]).to(q.dtype)
