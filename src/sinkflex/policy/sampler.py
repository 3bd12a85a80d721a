"""Continuous batched sampling for many conversations that keep their key-value cache across turns.

Each conversation is a `Stream`. A tick is one forward pass that decodes one token for every sampling stream and, in
the same pass, prefills new prompt tokens, so no stream waits for another. A new prompt copies the longest prefix that
any slot has cached; a conversation whose whole history a sibling has cached copies that. What is in a tick depends only
on the order of calls, never on time, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkflex.policy.slots import LENGTH_BUCKET, SlotCache, Tick


@dataclass(slots=True, eq=False)
class Stream:
    """One conversation in the sampler.

    Attributes:
        slot: its place in the cache (may change between ticks).
        cached: ids whose keys and values are stored.
        pending: ids to be prefilled before the next id is sampled.
        ids, logprobs: what the current turn has sampled so far.
        draws: gives one number in [0, 1) for each id this conversation samples.
    """

    slot: int
    draws: np.random.Generator
    pending: list[int]
    cached: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling: bool = True

    @property
    def tokens(self) -> int:
        """Ids in the conversation so far."""
        return len(self.cached) + len(self.pending)


@dataclass(slots=True)
class Sampled:
    """One finished turn: ids as sampled with their log-probs; finish is "stop" or "length"."""

    stream: Stream
    ids: list[int]
    logprobs: list[float]
    finish: str


class Sampler:
    """Samples turns for up to `slots` conversations at once.

    Args:
        model: a Hugging Face causal LM whose attention is `sink_plan`.
        stop_ids: ids that end a turn; the sampled one is part of the turn.
        slots: conversations held at once.
        max_tokens: capacity of a conversation in tokens.
        max_turn_tokens: limit of one turn in tokens.
        temperature: 0 is greedy (log-probs are then those at temperature 1).
        prefill_tokens: most prompt tokens of one conversation taken into one tick.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Sequence[int],
        *,
        slots: int,
        max_tokens: int,
        max_turn_tokens: int,
        temperature: float = 1.0,
        prefill_tokens: int = 512,
    ) -> None:
        shape = model.config
        parameter = next(model.parameters())
        head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.model = model
        self.device = parameter.device
        self.max_tokens = max_tokens
        self.max_turn_tokens = max_turn_tokens
        self.temperature = temperature
        self.ticks = self.prefilled = self.copied = self.decoded = 0
        self._stop = frozenset(stop_ids)
        self._prefill_tokens = prefill_tokens
        self._slots: list[Stream | None] = [None] * slots
        self._cached: list[list[int]] = [[] for _ in range(slots)]
        self._whole: dict[tuple[int, ...], int] = {}
        self._cache = SlotCache(
            shape.num_hidden_layers,
            shape.num_key_value_heads,
            head_dim,
            slots,
            max_tokens,
            parameter.device,
            parameter.dtype,
        )

    @property
    def free(self) -> int:
        """Number of conversations that can still be opened."""
        return self._slots.count(None)

    def clear(self) -> None:
        """Forget every cached prefix; call it whenever the weights have changed."""
        assert all(stream is None for stream in self._slots), "a conversation is still open"
        self._cached = [[] for _ in self._cached]
        self._whole = {}

    def open(self, ids: Sequence[int], draws: np.random.Generator) -> Stream:
        """Start a conversation with a prompt and sample its first turn; all its randomness comes from `draws`.

        Raises:
            ValueError: the prompt leaves no room for a sampled id.
        """
        require_room(len(ids), self.max_tokens)
        slot = self._slots.index(None)
        stream = Stream(slot=slot, draws=draws, pending=list(ids))
        self._slots[slot] = stream
        return stream

    def extend(self, stream: Stream, ids: Sequence[int]) -> None:
        """Add ids after the last sampled one and sample the next turn."""
        stream.pending.extend(ids)
        stream.ids, stream.logprobs = [], []
        stream.sampling = True

    def restart(self, stream: Stream, ids: Sequence[int]) -> None:
        """Replace the whole conversation (its history was rewritten) and sample the next turn."""
        stream.cached, stream.pending = [], []
        self.extend(stream, ids)

    def close(self, stream: Stream) -> None:
        """End a conversation; its cache stays usable as a prefix until the slot is taken again."""
        assert self._slots[stream.slot] is stream
        self._slots[stream.slot] = None

    @torch.inference_mode()
    def tick(self) -> list[Sampled]:
        """Run one forward pass and return the turns that ended in it, decoding streams first, in slot order."""
        self._compact()
        decode, prefill = self._choose()
        if not decode and not prefill:
            return []
        tick, ids, last = self._lay_out(decode, prefill)
        self._cache.begin(tick)
        logits = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=tick.position[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=self.device),
            slots=self._cache,
        ).logits[0]
        self.ticks += 1
        self.decoded += len(decode)
        self.prefilled += len(ids) - len(decode)
        ready = decode + [stream for stream, taken in prefill if not stream.pending]
        keep = list(range(len(decode))) + [
            len(decode) + i for i, (stream, _) in enumerate(prefill) if not stream.pending
        ]
        return self._sample(ready, logits[keep].float())

    def _choose(self) -> tuple[list[Stream], list[tuple[Stream, int]]]:
        """Pick the streams that decode, and those that prefill with how many ids."""
        decode, prefill, begun = [], [], set()
        for stream in self._slots:
            if stream is None or not stream.sampling:
                continue
            if stream.cached and len(stream.pending) > 1:
                whole = (*stream.cached, *stream.pending)
                if whole in begun:
                    continue  # a sibling with the same history prefills it now; copy from it in the next tick
                self._copy_whole(stream, whole)
                begun.add(whole)
            if stream.cached and len(stream.pending) == 1:
                decode.append(stream)
            elif stream.cached or self._reuse(stream, [s for s, _ in prefill]):
                prefill.append((stream, min(len(stream.pending), self._prefill_tokens)))
        return decode, prefill

    def _copy_whole(self, stream: Stream, whole: tuple[int, ...]) -> None:
        """Copy the pending ids' keys and values, all but the last one's, from a slot that holds this very history."""
        source, size = self._whole.get(whole, -1), len(whole)
        if source < 0 or source == stream.slot or tuple(self._cached[source][:size]) != whole:
            return
        self._cache.copy(source, stream.slot, size - 1, start=len(stream.cached))
        self.copied += len(stream.pending) - 1
        stream.cached += stream.pending[:-1]
        stream.pending = stream.pending[-1:]

    def _reuse(self, stream: Stream, batch: list[Stream]) -> bool:
        """Copy the longest cached prefix into a new stream; False: wait, a longer one is being prefilled now."""
        prompt = np.asarray(stream.pending)
        usable = len(prompt) - 1
        best, source = 0, -1
        for slot, cached in enumerate(self._cached):
            match = min(_common_prefix(prompt, cached), usable)
            if match > best:
                best, source = match, slot
        for other in batch:
            if min(_common_prefix(prompt, other.cached + other.pending), usable) > best:
                return False
        if best:
            if source != stream.slot:
                self._cache.copy(source, stream.slot, best)
            stream.cached, stream.pending = stream.pending[:best], stream.pending[best:]
            self._cached[stream.slot] = stream.cached
            self.copied += best
        return True

    def _lay_out(self, decode: list[Stream], prefill: list[tuple[Stream, int]]) -> tuple[Tick, list[int], list[int]]:
        ids, slot, position, rows, last = [], [], [], [], []
        for stream, taken in [(s, 1) for s in decode] + prefill:
            start = len(stream.cached)
            new = stream.pending[:taken]
            if len(last) >= len(decode):
                rows.append((len(ids), taken))
            ids += new
            slot += [stream.slot] * taken
            position += range(start, start + taken)
            last.append(len(ids) - 1)
            stream.cached += new
            stream.pending = stream.pending[taken:]
            self._cached[stream.slot] = stream.cached
            if taken > 1 and not stream.pending:
                self._whole[tuple(stream.cached)] = stream.slot
        span = max(slot) + 1
        length = -(-(max(position) + 1) // LENGTH_BUCKET) * LENGTH_BUCKET
        place = torch.tensor([slot, position], device=self.device)
        tick = Tick(place[0], place[1], len(decode), rows, span, min(length, self._cache.capacity))
        return tick, ids, last

    def _sample(self, streams: list[Stream], logits: Tensor) -> list[Sampled]:
        if not streams:
            return []
        logprobs = torch.log_softmax(logits / (self.temperature or 1.0), dim=-1)
        if self.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            uniform = torch.tensor([s.draws.random() for s in streams], dtype=torch.float64, device=self.device)
            # Whole numbers add up to the same in any order, so that CUDA has a deterministic cumsum for them.
            cumulative = (logprobs.double().exp() * 2.0**50).long().cumsum(-1)
            target = (uniform[:, None] * cumulative[:, -1:]).long()
            chosen = (cumulative <= target).sum(-1).clamp(max=logits.shape[-1] - 1)
        picked = logprobs.gather(-1, chosen[:, None])[:, 0]
        done = []
        for stream, token, logprob in zip(streams, chosen.tolist(), picked.tolist(), strict=True):
            stream.ids.append(token)
            stream.logprobs.append(logprob)
            stream.pending = [token]
            full = len(stream.ids) >= self.max_turn_tokens or stream.tokens >= self.max_tokens
            if token in self._stop or full:
                stream.sampling = False
                done.append(Sampled(stream, stream.ids, stream.logprobs, "stop" if token in self._stop else "length"))
        return done

    def _compact(self) -> None:
        """Move the last streams into free slots before them, so that attention reads no empty slot."""
        used = [stream for stream in self._slots if stream is not None]
        for stream in reversed(used):
            target = self._slots.index(None) if None in self._slots else len(self._slots)
            if target > stream.slot:
                break
            self._cache.copy(stream.slot, target, len(stream.cached))
            self._slots[stream.slot], self._slots[target] = None, stream
            self._cached[target], self._cached[stream.slot] = stream.cached, []
            stream.slot = target


def require_room(prompt: int, max_tokens: int) -> None:
    """Refuse a prompt of so many tokens that an episode of `max_tokens` has no room for a sampled one.

    Raises:
        ValueError: with the options to change.
    """
    if prompt >= max_tokens:
        raise ValueError(
            f"the prompt has {prompt} tokens and rollout.max_tokens is {max_tokens}: "
            f"raise it (--set rollout.max_tokens={2 * prompt}) or shorten prompt.policy_text"
        )


def _common_prefix(a: np.ndarray, b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differs = np.flatnonzero(a[:n] != np.asarray(b[:n]))
    return int(differs[0]) if len(differs) else n
