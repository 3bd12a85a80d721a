"""Key-value slots for sampling: one slot a live conversation, kept across its turns, attended in place.

A tick runs one forward pass over a flat list of new tokens, some for each conversation. Linear layers see all of them
as one matrix; attention takes each conversation's tokens to its own keys and values: no copies and no padding.

Shape letters: S slots, N tokens of the tick, T new tokens of a conversation, L its cached tokens, H heads, H_kv
key-value heads, W window, M slot capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH_BUCKET = 64
SCORES = 2**28  # most attention scores that are formed at once where no kernel takes conversations one by one


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one conversation in a tick.

    Attributes:
        slot: where its keys and values are kept.
        start: position of its first new token.
        offset: place of that token among the N tokens of the tick.
        tokens: how many there are.
    """

    slot: int
    start: int
    offset: int
    tokens: int


class SlotCache:
    """Keys and values of every slot and layer, and attention with sinks over them.

    Args:
        layers, kv_heads, head_dim: the model's shape.
        slots: number of conversations held at once.
        capacity: tokens a slot can hold.
        device, dtype: where and how keys and values are stored.

    Attributes:
        position: [N] int64 positions of the tick's tokens.
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
        self.position = torch.zeros(0, dtype=torch.int64, device=device)
        self._slot = self.position
        self._segments: Sequence[Segment] = ()
        self._masks: dict[int | None, Tensor] = {}

    def begin(self, segments: Sequence[Segment]) -> None:
        """Announce the tokens of the next forward pass."""
        self._segments = segments
        slot = [segment.slot for segment in segments for _ in range(segment.tokens)]
        position = [at for segment in segments for at in range(segment.start, segment.start + segment.tokens)]
        self._slot, self.position = torch.tensor([slot, position], device=self.keys[0].device)

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
        keys, values = self.keys[layer], self.values[layer]
        keys[self._slot, :, self.position] = k[0].transpose(0, 1)
        values[self._slot, :, self.position] = v[0].transpose(0, 1)
        pieces = self._one_by_one if q.device.type == "cpu" else self._side_by_side
        out, lse = pieces(q[0], keys, values, scale, window)
        if sinks is not None:
            out *= torch.sigmoid(lse - sinks.to(lse.dtype))[..., None].to(out.dtype)
        return out[None]

    def _one_by_one(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """One kernel call a conversation, on the keys it sees: outputs [N, H, D] and log-sum-exps [N, H].

        Query heads that share keys are neighbouring rows of one matrix.
        """
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        heads, tokens, size = q.shape
        kv_heads, shared = keys.shape[1], heads // keys.shape[1]
        q = q.view(kv_heads, shared, tokens, size).transpose(1, 2).reshape(1, kv_heads, tokens * shared, size)
        mask = self._triangle(window, shared, q)
        outs, sums = [], []
        for s in self._segments:
            first = 0 if window is None else max(0, s.start + 1 - window)
            old, seen = s.start - first, s.start - first + s.tokens
            hidden = mask[: s.tokens * shared, self.capacity - old : self.capacity + s.tokens] if s.tokens > 1 else None
            rows = q.narrow(2, s.offset * shared, s.tokens * shared)
            k, v = keys[s.slot : s.slot + 1], values[s.slot : s.slot + 1]
            k, v = k.narrow(2, first, seen), v.narrow(2, first, seen)
            out, lse = kernel(rows, k, v, 0.0, False, attn_mask=hidden, scale=scale)
            outs.append(out)
            sums.append(lse)
        out = torch.cat(outs, 2).view(kv_heads, tokens, heads // kv_heads, size).transpose(0, 1)
        lse = torch.cat(sums, 2).view(kv_heads, tokens, heads // kv_heads).transpose(0, 1)
        return out.reshape(tokens, heads, size), lse.reshape(tokens, heads)

    def _triangle(self, window: int | None, shared: int, like: Tensor) -> Tensor:
        """Additive mask whose part [:T * shared, M - old : M + T] is that of T tokens below `old` cached ones."""
        most = max(segment.tokens for segment in self._segments)
        mask = self._masks.get(window)
        if mask is None or len(mask) < most * shared:
            token = torch.arange(most)[:, None]
            key = torch.arange(-self.capacity, most)
            hidden = key > token
            if window is not None:
                hidden |= key <= token - window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat_interleave(shared, 0)
            self._masks[window] = mask
        return mask

    def _side_by_side(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Conversations as rows of a batch, padded to the longest: outputs [N, H, D] and log-sum-exps [N, H]."""
        heads, tokens, size = q.shape
        out, sums = q.new_empty(tokens, heads, size), q.new_empty(tokens, heads, dtype=torch.float32)
        for part in self._batches(heads):
            longest, stop = max(s.tokens for s in part), max(s.start + s.tokens for s in part)
            offset, start, count, slot = torch.tensor(
                [[s.offset, s.start, s.tokens, s.slot] for s in part], device=q.device
            ).T
            inside = torch.arange(longest, device=q.device)
            real = inside < count[:, None]
            source = torch.where(real, offset[:, None] + inside, offset[:, None])
            position = (start[:, None] + inside)[:, :, None]
            at = torch.arange(stop, device=q.device)
            seen = at <= position
            if window is not None:
                seen &= at > position - window
            k, v = (x[slot, :, :stop].repeat_interleave(heads // x.shape[1], dim=1) for x in (keys, values))
            scores = (q[:, source].transpose(0, 1) @ k.transpose(-1, -2)).float() * scale
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            lse = scores.logsumexp(-1, keepdim=True)
            found = (scores - lse).exp().to(q.dtype) @ v
            out[source[real]] = found.transpose(1, 2)[real]
            sums[source[real]] = lse[..., 0].transpose(1, 2)[real]
        return out, sums

    def _batches(self, heads: int) -> list[list[Segment]]:
        """Segments of like length together, so few at once that their scores fit."""
        parts: list[list[Segment]] = []
        for segment in sorted(self._segments, key=lambda s: s.tokens):
            scores = heads * segment.tokens * max(s.start + s.tokens for s in [segment, *(parts[-1] if parts else [])])
            if parts and (len(parts[-1]) + 1) * scores <= SCORES and segment.tokens <= 2 * parts[-1][0].tokens:
                parts[-1].append(segment)
            else:
                parts.append([segment])
        return parts
