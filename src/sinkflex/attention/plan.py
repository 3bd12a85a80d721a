"""Masks as data: which token sees which, for packed rows, padding, shared prefixes and trees, without an S x S tensor.

A plan describes N tokens in depth-first order. Token i sees token j iff `j <= i and i < subtree_end[j]`; a padding
token has `subtree_end[j] = j`. The position of a token is its depth on its own path, so that with a window of w keys
token i also needs `position[i] - position[j] < w or position[j] < prefix_tokens`.

Three words explain how a mask becomes work:

    run    a maximal chain of first children: contiguous tokens, each the child of the one before it.
    piece  a rectangle of queries x keys for one kernel call, unmasked or causal from the bottom right corner.
    tail   the last window - 1 tokens of the path above a run.

    prompt p, two answers a and b:      p p p a a b b      runs: [p p p a a] and [b b]
    full layer:    causal (ppp aa x ppp aa), causal (bb x bb), unmasked (bb x ppp), merged by log-sum-exp
    window layer:  causal (ppp aa x ppp aa), causal (bb x tail of ppp + bb), nothing to merge

Shape letters: N tokens of the plan, B rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Span = tuple[int, int]

KEPT = 32  # layouts that are remembered: the windows of the few plans whose layers are run at the same time


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, stop), each the child of the one before it.

    Attributes:
        stop: end of the run itself.
        end: end of the subtree of its first token.
        depth: position of its first token.
        path: spans of the tokens above it, root first; empty for a root.
    """

    start: int
    stop: int
    end: int
    depth: int
    path: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries [start, stop) against the concatenation of the key spans.

    Attributes:
        causal: the last query sees every key, the one before it all but the last, and so on (bottom-right aligned);
            there are never more queries than keys.
        window: with `causal`, number of keys a query sees at most.
        first: True if no earlier piece of the list holds these queries; the results of later ones are merged.
    """

    start: int
    stop: int
    keys: tuple[Span, ...]
    causal: bool
    window: int | None = None
    first: bool = False


class Plan:
    """The mask of N tokens in depth-first order.

    Plans are equal, and share what was computed for them, when their tokens see the same tokens.

    Args:
        subtree_end: [N] index after the last descendant of each token; the index of the token itself for padding.
        prefix_tokens: first tokens of every path that a window never hides.

    Attributes:
        position: [N] int64 depth of each token on its path (0 for padding): the model's `position_ids`.
        subtree_end: [N] int64.
        runs: the chains of first children, in token order.

    Raises:
        ValueError: if the subtrees are not nested, or padding lies inside one.
    """

    def __init__(self, subtree_end: Sequence[int] | np.ndarray, prefix_tokens: int = 0) -> None:
        self.subtree_end = np.array(subtree_end, dtype=np.int64)
        self.prefix_tokens = int(prefix_tokens)
        if self.subtree_end.ndim != 1 or not len(self.subtree_end):
            raise ValueError(f"subtree_end has shape {self.subtree_end.shape}; expected [N] with N >= 1")
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens is {prefix_tokens}; expected 0 or more")
        self.position = _depths(self.subtree_end)
        self.runs = _runs(self.subtree_end)
        digest = hashlib.blake2b(self.subtree_end.tobytes(), digest_size=16).digest()
        self._signature = (len(self.subtree_end), self.prefix_tokens, digest)

    @classmethod
    def causal(cls, tokens: int, prefix_tokens: int = 0) -> Plan:
        """One sequence of `tokens` tokens."""
        return cls.from_lengths([tokens], prefix_tokens=prefix_tokens)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], tokens: int | None = None, prefix_tokens: int = 0) -> Plan:
        """Documents packed one after another, then padding up to `tokens` (default: none)."""
        bounds = np.cumsum(lengths)
        used = int(bounds[-1]) if len(bounds) else 0
        total = used if tokens is None else tokens
        if any(length < 0 for length in lengths) or total < used:
            raise ValueError(f"lengths add up to {used}; expected no negative one and a sum of at most {total}")
        ends = np.concatenate([np.repeat(bounds, lengths), np.arange(used, total)])
        return cls(ends, prefix_tokens)

    @classmethod
    def padded(cls, attention_mask: np.ndarray, prefix_tokens: int = 0) -> Plan:
        """The rows of a padded batch, one after another.

        Args:
            attention_mask: [B, T], non-zero where a token is real; each row's real tokens are contiguous.
        """
        real = np.asarray(attention_mask) != 0
        if real.ndim != 2:
            raise ValueError(f"attention_mask has shape {real.shape}; expected [B, T]")
        rows, width = real.shape
        before = np.pad(real, ((0, 0), (1, 0)))[:, :-1]
        if ((real & ~before).sum(1) > 1).any():
            row = int(np.flatnonzero((real & ~before).sum(1) > 1)[0])
            raise ValueError(f"attention_mask row {row} has real tokens on both sides of padding; expected one block")
        stop = np.where(real.any(1), width - real[:, ::-1].argmax(1), 0)
        index = np.arange(rows * width).reshape(rows, width)
        return cls(np.where(real, (np.arange(rows) * width + stop)[:, None], index).reshape(-1), prefix_tokens)

    @classmethod
    def tree(cls, parent: Sequence[int] | np.ndarray, prefix_tokens: int = 0) -> Plan:
        """A forest given by the parent of each token (-1 for a root), in depth-first order."""
        parents = [int(p) for p in parent]
        ends = list(range(1, len(parents) + 1))
        for token in range(len(parents) - 1, -1, -1):
            if not -1 <= parents[token] < token:
                raise ValueError(f"parent of token {token} is {parents[token]}; expected -1 or an earlier token")
            if parents[token] >= 0:
                ends[parents[token]] = max(ends[parents[token]], ends[token])
        plan = cls(ends, prefix_tokens)
        _check_depth_first(parents, plan.position)
        return plan

    def __len__(self) -> int:
        return len(self.subtree_end)

    def __hash__(self) -> int:
        return hash(self._signature)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._signature == other._signature

    def __repr__(self) -> str:
        return f"Plan(tokens={len(self)}, runs={len(self.runs)}, prefix_tokens={self.prefix_tokens})"

    def pieces(self, window: int | None = None) -> tuple[Piece, ...]:
        """Rectangles that cover every visible (query, key) pair exactly once.

        Args:
            window: keys a token sees, itself included; None for all.
        """
        return _pieces(self, window)


def _depths(subtree_end: np.ndarray) -> np.ndarray:
    """Number of earlier tokens whose subtree holds each token, after checking that no padding has any."""
    tokens = len(subtree_end)
    index = np.arange(tokens)
    if (subtree_end < index).any() or (subtree_end > tokens).any():
        bad = int(np.flatnonzero((subtree_end < index) | (subtree_end > tokens))[0])
        raise ValueError(f"subtree_end[{bad}] is {subtree_end[bad]}; expected {bad} (padding) to {tokens}")
    real = subtree_end > index
    change = np.zeros(tokens + 1, dtype=np.int64)
    change[1:] += real
    change -= np.bincount(subtree_end[real], minlength=tokens + 1)
    position = np.cumsum(change)[:tokens]
    if position[~real].any():
        bad = int(np.flatnonzero(~real & (position > 0))[0])
        raise ValueError(f"token {bad} is padding inside the subtree of a token; expected it between documents")
    return position


def _runs(subtree_end: np.ndarray) -> tuple[Run, ...]:
    """Cut the tokens where the path changes, then join each first child to its parent.

    A stretch of equal `subtree_end` is a chain. `open_stretches` holds, for the path above the current stretch, the
    end of each subtree, the end of the stretch, and its run as (start, path).
    """
    tokens = len(subtree_end)
    real = subtree_end > np.arange(tokens)
    fresh = np.ones(tokens, dtype=bool)
    fresh[1:] = ~real[:-1] | (subtree_end[1:] != subtree_end[:-1])
    starts = np.flatnonzero(real & fresh)
    stops = np.append(np.flatnonzero(fresh | ~real), tokens)
    stops = stops[np.searchsorted(stops, starts, side="right")]
    runs: list[Run] = []
    open_stretches: list[tuple[int, int, int]] = []  # subtree end, stretch stop, index of its run
    for start, stop, end in zip(starts.tolist(), stops.tolist(), subtree_end[starts].tolist(), strict=True):
        while open_stretches and open_stretches[-1][0] <= start:
            open_stretches.pop()
        if open_stretches and end > open_stretches[-1][0]:
            raise ValueError(f"subtree_end[{start}] is {end}, which crosses another subtree; expected nested subtrees")
        if not open_stretches:
            runs.append(Run(start, stop, end, 0, ()))
        elif open_stretches[-1][1] == start:
            parent = runs[open_stretches[-1][2]]
            runs[open_stretches[-1][2]] = Run(parent.start, stop, parent.end, parent.depth, parent.path)
            open_stretches.append((end, stop, open_stretches[-1][2]))
            continue
        else:
            _, above, index = open_stretches[-1]
            path = (*runs[index].path, (runs[index].start, above))
            runs.append(Run(start, stop, end, sum(b - a for a, b in path), path))
        open_stretches.append((end, stop, len(runs) - 1))
    return tuple(runs)


def _check_depth_first(parents: list[int], position: np.ndarray) -> None:
    for token, parent in enumerate(parents):
        depth = 0 if parent < 0 else position[parent] + 1
        if position[token] != depth:
            raise ValueError(f"token {token} with parent {parent} breaks depth-first order; sort tokens depth first")


def last_tokens(path: tuple[Span, ...], count: int) -> tuple[Span, ...]:
    """Spans of the last `count` tokens of a path."""
    kept: list[Span] = []
    for start, stop in reversed(path):
        if count <= 0:
            break
        kept.append((max(start, stop - count), stop))
        count -= stop - start
    return tuple(reversed(kept))


def _first_tokens(path: tuple[Span, ...], count: int) -> tuple[Span, ...]:
    kept: list[Span] = []
    for start, stop in path:
        if count <= 0:
            break
        kept.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(kept)


@lru_cache(maxsize=KEPT)
def _pieces(plan: Plan, window: int | None) -> tuple[Piece, ...]:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected 1 or more, or None for no window")
    longest = max((run.depth + run.stop - run.start for run in plan.runs), default=0)
    if window is None or window >= longest:
        own = [Piece(run.start, run.stop, ((run.start, run.stop),), True, None, True) for run in plan.runs]
        return (*own, *_shared(plan.runs))
    pieces = []
    for run in plan.runs:
        tail = last_tokens(run.path, window - 1)
        pieces.append(Piece(run.start, run.stop, (*tail, (run.start, run.stop)), True, window, True))
    for run in plan.runs if plan.prefix_tokens else ():
        pieces += _prefix(run, window, plan.prefix_tokens)
    return tuple(pieces)


def _shared(runs: tuple[Run, ...]) -> list[Piece]:
    """The tokens below a run against the part of the run above it that they share; neighbors that share it are one."""
    pieces: list[Piece] = []
    for run in runs:
        if not run.path:
            continue
        keys = run.path[-1:]
        for index in range(len(pieces) - 1, -1, -1):
            if pieces[index].keys == keys and pieces[index].stop == run.start:
                pieces[index] = Piece(pieces[index].start, run.end, keys, False)
                break
        else:
            pieces.append(Piece(run.start, run.end, keys, False))
    return pieces


def _prefix(run: Run, window: int, prefix_tokens: int) -> list[Piece]:
    """What the window hides of the first tokens of the path: nothing before position `window`, then one more each."""
    last = run.depth + run.stop - run.start  # position after the run
    path = (*run.path, (run.start, run.stop))
    pieces = []
    partial_start, partial_stop = max(run.depth, window), min(last, window + prefix_tokens)
    if partial_start < partial_stop:
        keys = _first_tokens(path, partial_stop - window)
        rows = (run.start + partial_start - run.depth, run.start + partial_stop - run.depth)
        pieces.append(Piece(*rows, keys, True))
    whole_start = max(run.depth, window + prefix_tokens)
    if whole_start < last:
        pieces.append(Piece(run.start + whole_start - run.depth, run.stop, _first_tokens(path, prefix_tokens), False))
    return pieces
