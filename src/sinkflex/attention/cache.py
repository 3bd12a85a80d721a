"""Decoding with sinks: keys and values of answers that grow below a shared prompt.

The pieces are those of training: queries against some keys give (O, LSE), pieces merge by LSE, the sink is one more
piece whose value is 0. What differs is the shape. A decode step has one query a head, so the query heads that share
keys are packed as rows of one matrix and every key is read once:

    shared prompt   q [1, K, members x T x g, D]  against [1, K, P, D]: read once for the whole group
    own tokens      q [members, K, T x g, D]      against [members, K, own, D]
    window layer    q [members, K, T x g, D]      against a ring of `window` keys a member, that starts as the prompt's

A ring needs no order, since keys carry their rotary position: position p lives in slot p mod window.

    cache = GroupCache(windows=[128, None], members=8, kv_heads=2, head_dim=64, capacity=512)
    out = cache.prefill(layer, q, k, v, sinks)     the prompt, once, layer after layer
    cache.begin(tokens=1)                          then for every forward pass: how many new tokens each member has,
    out = cache.extend(layer, q, k, v, sinks)      their attention, layer after layer,
    cache.advance()                                and they count as held

Shape letters: G members, H query heads, K key heads, g = H / K, T new tokens, P prompt tokens, L keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention

MASK_ELEMENTS = 2**22  # of one mask; longer prefills on a cache go in chunks of queries


class GroupCache:
    """Keys and values of a prompt and of the G answers below it, for every layer.

    Args:
        windows: one entry a layer: keys a token sees, or None for all.
        members: G.
        kv_heads: K.
        head_dim: D.
        capacity: own tokens a member can hold in layers without a window.

    Attributes:
        lengths: [G] int64 own tokens of each member.
        prompt_tokens: P.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        members: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.windows = tuple(windows)
        self.capacity = capacity
        self.lengths = torch.zeros(members, dtype=torch.long, device=device)
        self.prompt_tokens = 0
        held = [window or capacity for window in self.windows]
        self._own = [torch.zeros(2, members, kv_heads, n, head_dim, dtype=dtype, device=device) for n in held]
        self._prompt: list[Tensor | None] = [None] * len(held)  # [2, 1, K, P, D] in layers without a window

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Attention of the prompt with itself, which all members then share.

        Args:
            q: [1, H, P, D].
            k: [1, K, P, D].
            v: [1, K, P, D].

        Returns:
            [1, H, P, D].
        """
        self.prompt_tokens = q.shape[2]
        window = self.windows[layer]
        if window is None:
            self._prompt[layer] = torch.stack([k, v])
        else:
            position = torch.arange(max(0, self.prompt_tokens - window), self.prompt_tokens, device=q.device)
            self._own[layer][:, :, :, position % window] = torch.stack([k, v])[:, :, :, position]
        return sink_attention(q, k, v, Plan.causal(self.prompt_tokens), sinks, scale, window)

    def begin(self, tokens: int = 1, counts: Tensor | None = None) -> None:
        """Announce the new tokens of a forward pass.

        Args:
            tokens: T.
            counts: [G] how many of its T tokens are real for each member, from the first on; all by default.

        Raises:
            ValueError: if a member would exceed the capacity.
        """
        new = torch.arange(tokens, device=self.lengths.device).expand(len(self.lengths), tokens)
        counts = torch.full_like(self.lengths, tokens) if counts is None else counts
        longest = int((self.lengths + counts).max())
        if longest > self.capacity and None in self.windows:
            raise ValueError(f"a member would hold {longest} tokens; the cache was made with capacity={self.capacity}")
        self._tick = _Tick(self.lengths[:, None] + new, new < counts[:, None], counts, longest)

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Store the new tokens of every member in one layer and attend from them.

        Args:
            q: [G, H, T, D], already rotated to position P + length + 0, 1, ...
            k: [G, K, T, D].
            v: [G, K, T, D].

        Returns:
            [G, H, T, D]; without meaning where a token is not real.
        """
        extend = self._extend_full if self.windows[layer] is None else self._extend_ring
        return merge(extend(layer, q, torch.stack([k, v]), scale), sinks).to(q.dtype)

    def advance(self) -> None:
        """Count the new tokens as held; call after the last layer."""
        self.lengths += self._tick.counts

    def _extend_full(self, layer: int, q: Tensor, new: Tensor, scale: float | None) -> list[tuple[Tensor, Tensor]]:
        own, prompt, tick = self._own[layer], self._prompt[layer], self._tick
        if None not in tick.plans:
            key = torch.arange(tick.longest, device=q.device)
            tick.plans[None] = (
                tick.real.nonzero(as_tuple=True),
                tick.where[tick.real],
                _mask(key <= tick.where[..., None]),
            )
        (member, token), slot, seen = tick.plans[None]
        own[:, member, :, slot] = new[:, member, :, token]
        k, v = own[:, :, :, : tick.longest]
        parts = [piece(q, k, v, scale, seen)]
        if prompt is not None:
            members, heads, tokens, size = q.shape
            together = q.transpose(0, 1).reshape(1, heads, members * tokens, size)
            out, lse = piece(together, prompt[0], prompt[1], scale)
            shape = (heads, members, tokens)
            parts.append((out.view(*shape, size).transpose(0, 1), lse.view(shape).transpose(0, 1)))
        return parts

    def _extend_ring(self, layer: int, q: Tensor, new: Tensor, scale: float | None) -> list[tuple[Tensor, Tensor]]:
        """Attend to the ring as it was and to the new tokens, then let those take the place of the oldest.

        A single new token takes its place first: what it displaces is just out of its sight.
        """
        ring, tick, window = self._own[layer], self._tick, self.windows[layer]
        assert window is not None
        if window not in tick.plans:
            tick.plans[window] = self._ring_plan(window)
        (member, token), slot, seen = tick.plans[window]
        if q.shape[2] > 1:
            k, v = torch.cat([ring, new], 3)
            ring[:, member, :, slot] = new[:, member, :, token]
            return [piece(q, k, v, scale, seen)]
        ring[:, member, :, slot] = new[:, member, :, token]
        return [piece(q, ring[0], ring[1], scale, seen)]

    def _ring_plan(self, window: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Which new tokens to store, in which slot of the ring, and which slots and new tokens each one sees."""
        tick = self._tick
        position = self.prompt_tokens + tick.where
        stored = tick.real & (tick.where >= (self.lengths + tick.counts)[:, None] - window)
        single = position.shape[1] == 1
        last = self.prompt_tokens + self.lengths[:, None] - 1  # newest position in each ring
        if single:
            last = last + tick.counts[:, None]
        slot = torch.arange(window, device=position.device)
        at = last - (last - slot) % window  # the position that each slot holds; negative for none
        if not single:
            at = torch.cat([at, torch.where(tick.real, position, -1)], 1)
        at, query = at[:, None, :], position[:, :, None]
        seen = (at >= 0) & (at <= query) & (query - at < window)
        return stored.nonzero(as_tuple=True), position[stored] % window, _mask(seen)


@dataclass(slots=True)
class _Tick:
    """The new tokens of one forward pass.

    Attributes:
        where: [G, T] own position of each.
        real: [G, T] bool.
        counts: [G] number of real ones.
        longest: own tokens of the longest member, the new ones included.
        plans: by window: (member, token) of what is stored, its slot, and what each token sees.
    """

    where: Tensor
    real: Tensor
    counts: Tensor
    longest: int
    plans: dict[int | None, tuple[tuple[Tensor, ...], Tensor, Tensor | None]] = field(default_factory=dict)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens of rows whose L keys are all there, e.g. from a cache of transformers.

    Args:
        q: [B, H, T, D] with T <= L.
        k: [B, K, L, D].
        v: [B, K, L, D].
        real: [B, L] bool, False for padding; None if there is none.

    Returns:
        [B, H, T, D].
    """
    tokens, length = q.shape[2], k.shape[2]
    chunk = max(1, MASK_ELEMENTS // (length * q.shape[0] * (q.shape[1] // k.shape[1])))
    key = torch.arange(length, device=q.device)
    outs = []
    for start in range(0, tokens, chunk):
        rows = q[:, :, start : start + chunk]
        query = length - tokens + start + torch.arange(rows.shape[2], device=q.device)[:, None]
        seen = (key <= query)[None]
        if window is not None:
            seen = seen & (query - key < window)
        if real is not None:
            seen = seen & real[:, None]
        outs.append(merge([piece(rows, k, v, scale, _mask(seen))], sinks))
    return torch.cat(outs, 2).to(q.dtype)


def piece(q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Queries against one set of keys, the heads that share keys packed as rows.

    Args:
        q: [B, H, T, D].
        k: [B, K, L, D].
        v: [B, K, L, D].
        seen: [B or 1, T, L] bool, or None if all is seen.

    Returns:
        Output [B, H, T, D] and log-sum-exp [B, H, T], both float32 at least; 0 and -inf for a query that sees nothing.
    """
    batch, heads, tokens, size = q.shape
    group = heads // k.shape[1]
    exact = torch.promote_types(torch.float32, q.dtype)
    rows = q.reshape(batch, k.shape[1], group * tokens, size)
    scale = size**-0.5 if scale is None else scale
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape, dtype=exact, device=q.device).masked_fill_(~seen, -torch.inf)
        mask = mask.repeat(1, group, 1)[:, None]
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, attn_mask=mask, scale=scale)
    else:
        scores = (rows @ k.mT).to(exact).mul(scale)
        scores = scores if mask is None else scores + mask
        lse = scores.logsumexp(-1)
        out = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp().to(v.dtype) @ v
    out, lse = out.to(exact).reshape(batch, heads, tokens, size), lse.to(exact).reshape(batch, heads, tokens)
    if seen is not None:
        lse = lse.masked_fill(~seen.any(2)[:, None], -torch.inf)  # the CPU operator returns 0
    return out, lse


def _mask(seen: Tensor) -> Tensor | None:
    """None if all is seen."""
    return None if bool(seen.all()) else seen


def merge(parts: list[tuple[Tensor, Tensor]], sinks: Tensor | None) -> Tensor:
    """Join (output, log-sum-exp) of pieces of the same queries, in the given order, and the sinks [H]."""
    out, lse = parts[0]
    for more, more_lse in parts[1:]:
        share = torch.sigmoid(more_lse - lse).nan_to_num(0.0)[..., None]  # neither sees anything: 0
        out, lse = torch.lerp(out, more, share), torch.logaddexp(lse, more_lse)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])[..., None]
    return out
