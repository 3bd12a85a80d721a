"""Continuous batched sampling for many conversations that keep their key-value cache across turns.

Each conversation is a `Stream`. A tick is one forward pass that takes from every stream what it has not computed yet:
new prompt ids, the last sampled id, and a draft of what may follow, so no stream waits for another. A new prompt copies
the longest prefix that any slot has cached; a conversation whose whole history a sibling has cached copies that. What
is in a tick depends only on the order of calls, never on time, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkflex.learner.packing import common_prefix
from sinkflex.policy.drafts import CONTEXTS, Drafts
from sinkflex.policy.slots import Segment, SlotCache

WORTH_WAITING = 64  # ids that a sibling computes now and that are copied in the next tick
TICK_TOKENS = 8192  # ids of one forward pass; a stream that comes after them waits, so that memory is bounded


@dataclass(slots=True, eq=False)
class Stream:
    """One conversation in the sampler.

    Attributes:
        slot: its place in the cache.
        draws: gives one number in [0, 1) for each id this conversation samples.
        pending: ids to be prefilled before the next id is sampled.
        cached: ids whose keys and values are stored.
        ids, logprobs: what the current turn has sampled so far.
        ahead: numbers that were drawn for ids that are still to come.
    """

    slot: int
    draws: np.random.Generator
    pending: list[int]
    cached: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    sampling: bool = True

    @property
    def tokens(self) -> int:
        """Ids in the conversation so far."""
        return len(self.cached) + len(self.pending)

    def numbers(self, count: int) -> list[float]:
        """Return the numbers for the next ids, which stay those of these ids until they are sampled."""
        if len(self.ahead) < count:
            self.ahead += self.draws.random(count - len(self.ahead)).tolist()
        return self.ahead[:count]


@dataclass(slots=True)
class Share:
    """What a tick computes for one stream: so many of its pending ids, and a draft of what follows the last of them.

    Attributes:
        sizes: lengths of the contexts that the draft came from.
    """

    stream: Stream
    taken: int
    draft: list[int]
    sizes: list[int]

    @property
    def samples(self) -> bool:
        """Whether the stream's next id comes out of this tick."""
        return not self.stream.pending


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
        draft_tokens: most ids that are drafted for one conversation in one tick; 0 samples one id a tick.

    Attributes:
        top_p: below 1, ids are sampled from the nucleus, and log-probs are those in it. For scores alone: the learner
            knows of no nucleus.
        drafts: what drafts come from; it outlives the weights.
        ticks, passes: forward passes so far, and conversations that were in them.
        prefilled, copied: prompt ids that were computed, and that were copied instead.
        sampled, rejected: ids of turns, and drafted ids that were not sampled.
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
        draft_tokens: int = 24,
    ) -> None:
        shape = model.config
        parameter = next(model.parameters())
        head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.model = model
        self.device = parameter.device
        self.max_tokens = max_tokens
        self.max_turn_tokens = max_turn_tokens
        self.temperature, self.top_p = temperature, 1.0
        self.ticks = self.passes = self.prefilled = self.copied = self.sampled = self.rejected = 0
        self._stop = frozenset(stop_ids)
        self._prefill_tokens = prefill_tokens
        self.drafts = Drafts(draft_tokens)
        self._slots: list[Stream | None] = [None] * slots
        self._cached: list[list[int]] = [[] for _ in range(slots)]
        self._whole: dict[int, int] = {}  # hash of a history: the slot that had it
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
        self.drafts.fade()

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
        """Run one forward pass and return the turns that ended in it, in slot order."""
        shares = self._choose()
        if not shares:
            return []
        ids, segments, wanted = self._lay_out(shares)
        self._cache.begin(segments)
        logits = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=self._cache.position[None],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted or [0], device=self.device),
            slots=self._cache,
        ).logits[0]
        self.ticks += 1
        self.passes += len(shares)
        return self._sample([share for share in shares if share.samples], logits.float()) if wanted else []

    def _choose(self) -> list[Share]:
        """Pick the streams that compute, with how many ids."""
        shares: list[Share] = []
        begun: set[tuple[int, ...]] = set()
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        tokens = 0
        for stream in self._slots:
            if stream is None or not stream.sampling or tokens >= TICK_TOKENS:
                continue
            if stream.cached and len(stream.pending) > 1:
                whole = (*stream.cached, *stream.pending)
                if whole in begun and len(stream.pending) >= WORTH_WAITING:
                    continue  # a sibling with the same history prefills it now; copy from it in the next tick
                self._copy_whole(stream, whole)
                begun.add(whole)
            if not stream.cached and not self._reuse(stream, [share.stream for share in shares], found):
                continue
            taken = min(len(stream.pending), self._prefill_tokens)
            draft, sizes = self._draft(stream) if taken == len(stream.pending) else ([], [])
            shares.append(Share(stream, taken, draft, sizes))
            tokens += taken + len(draft)
        return shares

    def _draft(self, stream: Stream) -> tuple[list[int], list[int]]:
        """Guess ids after the pending ones, no more than the turn and the conversation can hold."""
        limit = min(self.max_turn_tokens - len(stream.ids), self.max_tokens - stream.tokens) - 1
        return self.drafts.propose(stream.cached[-CONTEXTS[0] :] + stream.pending[-CONTEXTS[0] :], limit, self._stop)

    def _copy_whole(self, stream: Stream, whole: tuple[int, ...]) -> None:
        """Copy the pending ids' keys and values, all but the last one's, from a slot that holds this very history."""
        source, size = self._whole.get(hash(whole), -1), len(whole)
        if source < 0 or source == stream.slot or tuple(self._cached[source][:size]) != whole:
            return
        self._cache.copy(source, stream.slot, size - 1, start=len(stream.cached))
        self.copied += len(stream.pending) - 1
        stream.cached += stream.pending[:-1]
        stream.pending = stream.pending[-1:]

    def _reuse(self, stream: Stream, batch: list[Stream], found: dict[tuple[int, ...], tuple[int, int]]) -> bool:
        """Copy the longest cached prefix into a new stream; False: wait, a longer one is being prefilled now.

        `found` keeps what was found for equal prompts in this tick.
        """
        prompt, usable = stream.pending, len(stream.pending) - 1
        key = tuple(prompt)
        best, source = found.get(key, (0, -1))
        # The slot may have been taken anew since: within this tick, another stream's prefix is copied over it.
        if source < 0 or self._cached[source][:best] != prompt[:best]:
            lengths = [min(common_prefix(prompt, cached), usable) for cached in self._cached]
            best = max(lengths)
            found[key] = (best, lengths.index(best))
        best, source = found[key]
        for other in batch:
            if min(common_prefix(prompt, other.cached + other.pending), usable) > best:
                return False
        if best:
            if source != stream.slot:
                self._cache.copy(source, stream.slot, best)
            stream.cached, stream.pending = prompt[:best], prompt[best:]
            self._cached[stream.slot] = stream.cached
            self.copied += best
        return True

    def _lay_out(self, shares: list[Share]) -> tuple[list[int], list[Segment], list[int]]:
        """Return the ids of the pass, where each share of them lives, and the places whose logits are wanted."""
        ids: list[int] = []
        segments, wanted = [], []
        for share in shares:
            stream, taken = share.stream, share.taken
            segments.append(Segment(stream.slot, len(stream.cached), len(ids), taken + len(share.draft)))
            ids += stream.pending[:taken]
            stream.cached += stream.pending[:taken]
            stream.pending = stream.pending[taken:]
            self._cached[stream.slot] = stream.cached
            self.prefilled += taken - bool(stream.ids)
            if share.samples:
                wanted += range(len(ids) - 1, len(ids) + len(share.draft))
                if taken > 1:
                    self._whole[hash(tuple(stream.cached))] = stream.slot
            ids += share.draft
        return ids, segments, wanted

    def _sample(self, shares: list[Share], logits: Tensor) -> list[Sampled]:
        """Draw an id after each wanted place, and keep those whose ids before them were drafted rightly."""
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        if self.temperature == 0:
            chosen = logits.argmax(-1)
        else:
            numbers = [number for share in shares for number in share.stream.numbers(1 + len(share.draft))]
            if self.top_p < 1:
                logprobs = nucleus(logprobs, self.top_p)
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self.device)[:, None]
            # Whole numbers add up to the same in any order, so that CUDA has a deterministic cumsum for them. A float32
            # times a power of two is exact, and its 24 bits are all before the point or too few to matter.
            cumulative = (logprobs.exp() * 2.0**50).long().cumsum(-1)
            target = (uniform * cumulative[:, -1:]).long()
            chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        drawn, picked = chosen.tolist(), logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
        done, start = [], 0
        for share in shares:
            stream, draft = share.stream, share.draft
            right = 0
            while right < len(draft) and drawn[start + right] == draft[right]:
                right += 1
            sampled = drawn[start : start + right + 1]
            stream.ids += sampled
            stream.logprobs += picked[start : start + right + 1]
            stream.ahead = stream.ahead[right + 1 :]
            stream.cached += draft[:right]
            stream.pending = sampled[-1:]
            start += 1 + len(draft)
            self.sampled += len(sampled)
            self.rejected += len(draft) - right
            self.drafts.judge(share.sizes, right)
            full = len(stream.ids) >= self.max_turn_tokens or stream.tokens >= self.max_tokens
            if sampled[-1] in self._stop or full:
                stream.sampling = False
                said = [*stream.cached[-len(stream.ids) - CONTEXTS[0] :], *stream.pending]
                self.drafts.learn(said, len(said) - len(stream.ids))
                finish = "stop" if sampled[-1] in self._stop else "length"
                done.append(Sampled(stream, stream.ids, stream.logprobs, finish))
        return done


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


def nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Return the log-probs [N, V] of the likeliest ids that together have at least `top_p`, renormalized; else -inf.

    (Nucleus sampling, arXiv 1904.09751.)
    """
    ordered, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    beyond = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, ids, before >= top_p)
    return logprobs.masked_fill(beyond, float("-inf")).log_softmax(-1)
