"""Decoding with sinks: keys and values of answers that grow below a shared prompt.

A decode step has one query a head, and its time is that of reading keys and values. So each is read once, where it
lies: the query heads that share keys are packed as rows of one matrix, keys are kept transposed (rows of them are what
a product with few queries reads in order), new ones are written in place, and the sink is one more column of scores:

    shared prompt   q [K, G x g x T, D]  against [K, D, P]: read once for the whole group
    own tokens      q [K x G, g x T, D]  against [K x G, D, own]
    window layer    q [K x G, g x T, D]  against a ring of `window` keys a member, that starts as the prompt's

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

import numpy as np
import torch
from torch import Tensor

from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention

SCORES = 2**24  # formed at once; more new tokens than that go in chunks


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
        self.lengths = np.zeros(members, dtype=np.int64)
        self.prompt_tokens = 0
        self._device = torch.device(device)
        held = [window or capacity for window in self.windows]
        self._keys = [torch.zeros(kv_heads, members, head_dim, n, dtype=dtype, device=device) for n in held]
        self._values = [torch.zeros(kv_heads, members, n, head_dim, dtype=dtype, device=device) for n in held]
        # [K, D, P] and [K, P, D] in layers without a window.
        self._prompt: list[tuple[Tensor, Tensor] | None] = [None] * len(held)

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
            self._prompt[layer] = k[0].mT.contiguous(), v[0].contiguous()
        else:
            position = torch.arange(max(0, self.prompt_tokens - window), self.prompt_tokens, device=q.device)
            self._keys[layer][..., position % window] = k[0, :, None, position].mT
            self._values[layer][:, :, position % window] = v[0, :, None, position]
        return sink_attention(q, k, v, Plan.causal(self.prompt_tokens), sinks, scale, window)

    def begin(self, tokens: int = 1, counts: Sequence[int] | None = None) -> None:
        """Announce the new tokens of a forward pass.

        Args:
            tokens: T.
            counts: [G] how many of its T tokens are real for each member, from the first on; all by default.

        Raises:
            ValueError: if a member would exceed the capacity.
        """
        added = np.full_like(self.lengths, tokens) if counts is None else np.asarray(counts)
        longest = int((self.lengths + added).max())
        if longest > self.capacity and None in self.windows:
            raise ValueError(f"a member would hold {longest} tokens; the cache was made with capacity={self.capacity}")
        self._pass = _Pass(self.prompt_tokens, self.lengths, added, tokens, longest, self._device)

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
        place = self._pass.place(self.windows[layer])
        keys, values = self._keys[layer], self._values[layer]
        if place.beside:  # new tokens see keys of the ring that they displace
            seen = torch.cat([keys, k.permute(1, 0, 3, 2)], 3), torch.cat([values, v.transpose(0, 1)], 2)
            _store(keys, values, k, v, place)
        else:
            _store(keys, values, k, v, place)
            seen = keys[..., : place.shown], values[:, :, : place.shown]
        step = max(1, SCORES // (q.shape[0] * q.shape[1] * (self.prompt_tokens + seen[1].shape[2])))
        outs = []
        for start in range(0, q.shape[2], step):
            mask = None if place.mask is None else place.mask[:, start : start + step]
            outs.append(_grown(q[:, :, start : start + step], self._prompt[layer], seen, mask, sinks, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def advance(self) -> None:
        """Count the new tokens as held; call after the last layer."""
        self.lengths = self.lengths + self._pass.counts


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the new tokens of a forward pass go in the layers of one window, and what they see there.

    Attributes:
        slots: a slice that all members share, or (member, token, slot) of each token that is stored.
        shown: slots in use.
        mask: [G, T, keys] additive, None if all is seen.
        beside: the keys are the whole ring as it was, and the new tokens beside it.
    """

    slots: slice | tuple[Tensor, Tensor, Tensor]
    shown: int
    mask: Tensor | None
    beside: bool = False


@dataclass(slots=True)
class _Pass:
    """The new tokens of one forward pass; all numbers stay on the host until a layer needs them."""

    prompt: int
    lengths: np.ndarray
    counts: np.ndarray
    tokens: int
    longest: int
    device: torch.device
    places: dict[int | None, _Place] = field(default_factory=dict)

    def place(self, window: int | None) -> _Place:
        """The same for all layers of a window."""
        if window not in self.places:
            self.places[window] = self._full() if window is None else self._ring(window)
        return self.places[window]

    @property
    def _even(self) -> bool:
        """All members have one length, and all new tokens are real."""
        return bool((self.counts == self.tokens).all() and (self.lengths == self.lengths[0]).all())

    def _full(self) -> _Place:
        if self._even and self.tokens == 1:
            return _Place(slice(self.longest - 1, self.longest), self.longest, None)
        where = self.lengths[:, None] + np.arange(self.tokens)
        stored = np.arange(self.tokens) < self.counts[:, None]
        return _Place(self._slots(stored, where), self.longest, self._mask(np.arange(self.longest) <= where[..., None]))

    def _ring(self, window: int) -> _Place:
        """A single new token takes its slot first: what it displaces is just out of its sight."""
        where = self.prompt + self.lengths[:, None] + np.arange(self.tokens)
        if self._even and self.tokens == 1:
            slot, shown = int(where[0, 0]) % window, min(window, int(where[0, 0]) + 1)
            return _Place(slice(slot, slot + 1), shown, None)
        real = np.arange(self.tokens) < self.counts[:, None]
        stored = real & (where >= self.prompt + (self.lengths + self.counts)[:, None] - window)
        beside = self.tokens > 1
        last = self.prompt + self.lengths[:, None] - 1 + (0 if beside else self.counts[:, None])  # newest in each ring
        at = last - (last - np.arange(window)) % window  # the position that each slot holds; negative for none
        if beside:
            at = np.concatenate([at, np.where(real, where, -1)], 1)
        at, query = at[:, None, :], where[:, :, None]
        seen = (at >= 0) & (at <= query) & (query - at < window)
        return _Place(self._slots(stored, where % window), window, self._mask(seen), beside)

    def _slots(self, stored: np.ndarray, slot: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        member, token = np.nonzero(stored)
        member, token, kept = (torch.from_numpy(x).to(self.device) for x in (member, token, slot[stored]))
        return member, token, kept

    def _mask(self, seen: np.ndarray) -> Tensor | None:
        return None if seen.all() else _additive(torch.from_numpy(seen).to(self.device))


def _store(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, place: _Place) -> None:
    """Write new keys and values [G, K, T, D] into keys [K, G, D, slots] and values [K, G, slots, D]."""
    if isinstance(place.slots, slice):
        keys[..., place.slots] = k.permute(1, 0, 3, 2)
        values[:, :, place.slots] = v.transpose(0, 1)
        return
    member, token, slot = place.slots
    keys[:, member, :, slot] = k[member, :, token]
    values[:, member, slot] = v[member, :, token].transpose(0, 1)


def _grown(
    q: Tensor,
    prompt: tuple[Tensor, Tensor] | None,
    own: tuple[Tensor, Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Queries [G, H, T, D] against the prompt's keys [K, D, P] and own ones [K, G, D, L]; mask [G, T, L]."""
    members, heads, tokens, size = q.shape
    kv_heads = own[0].shape[0]
    group = heads // kv_heads
    rows = _rows(q, scale).view(members, kv_heads, group * tokens, size).transpose(0, 1)
    scores = _product(rows.reshape(kv_heads * members, group * tokens, size), own[0].flatten(0, 1))
    scores = scores.view(kv_heads, members, group, tokens, -1)
    if mask is not None:
        scores = scores + mask[:, None]
    parts = [scores]
    if prompt is not None:
        together = _product(rows.reshape(kv_heads, members * group * tokens, size), prompt[0])
        parts.append(together.view(kv_heads, members, group, tokens, -1))
    column = None if sinks is None else sinks.view(kv_heads, 1, group, 1, 1)
    weights = _softmax(parts, column).view(kv_heads * members, group * tokens, -1)
    length = scores.shape[-1]
    out = _product(weights[..., :length], own[1].flatten(0, 1)).view(kv_heads, members, group, tokens, size)
    if prompt is not None:
        weights = weights.view(kv_heads, members * group * tokens, -1)[..., length : length + prompt[1].shape[1]]
        out = out + _product(weights, prompt[1]).view_as(out)
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype)


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
        [B, H, T, D]; 0 for a query that sees nothing.
    """
    batch, heads, tokens, size = q.shape
    kv_heads, length = k.shape[1:3]
    keys, values = k.flatten(0, 1).mT, v.flatten(0, 1)
    column = None if sinks is None else sinks.view(heads, 1, 1)
    step = max(1, SCORES // (length * batch * heads))
    key = torch.arange(length, device=q.device)
    outs = []
    for part in q.split(step, 2):
        query = length - tokens + sum(x.shape[2] for x in outs) + torch.arange(part.shape[2], device=q.device)[:, None]
        seen = (key <= query)[None]
        if window is not None:
            seen = seen & (query - key < window)
        if real is not None:
            seen = seen & real[:, None]
        rows = _rows(part, scale).reshape(batch * kv_heads, -1, size)
        scores = _product(rows, keys).view(batch, heads, -1, length)
        if not bool(seen.all()):
            scores = scores + _additive(seen)[:, None]
        weights = _softmax([scores], column).view(*rows.shape[:2], -1)
        outs.append(_product(weights[..., :length], values).view(part.shape))
    return torch.cat(outs, 2).to(q.dtype)


def _rows(q: Tensor, scale: float | None) -> Tensor:
    return (q.to(_exact(q)) * (q.shape[-1] ** -0.5 if scale is None else scale)).contiguous()


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, x.dtype)


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _softmax(scores: list[Tensor], sinks: Tensor | None) -> Tensor:
    """Softmax over all parts of the scores and a last column, the sinks.

    Without sinks, or with ones of -inf, the column weighs nothing, except where no key is seen: then it weighs 1.
    """
    shape, dtype = scores[0].shape[:-1], scores[0].dtype
    lowest = torch.finfo(dtype).min
    column = scores[0].new_full((1,), lowest) if sinks is None else sinks.to(dtype).clamp(min=lowest)
    return torch.softmax(torch.cat([*scores, column.expand(*shape, 1)], -1), -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, R, x] by [n, x, y] in float32 at least: on CPU, half precision is what is stored and not what is computed."""
    if b.device.type == "cpu":
        return torch.bmm(a, b.to(_exact(b)))
    return torch.bmm(a.to(b.dtype), b).to(_exact(b))
