"""Rows to batches: one prefix forest a micro-batch, so that every shared token is computed once.

Rows are sorted by their ids; each adds only the tokens after its longest common prefix with the row before it. The
nodes come out in depth-first order: a node's subtree is the contiguous range up to `subtree_end`.

Example: rows (1 2 3) and (1 2 4 5).

    node         0  1  2  3  4
    token_ids    1  2  3  4  5
    parent      -1  0  1  1  3
    position     0  1  2  2  3
    subtree_end  5  5  3  5  5
    node_index  row 0: 0 1 2    row 1: 0 1 3 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sinkflex.trajectory import Row


@dataclass(slots=True)
class Batch:
    """One micro-batch: a prefix forest of N nodes and the rows on it.

    Attributes:
        token_ids, position, parent, subtree_end: [N] int64 per node; roots have parent -1.
        rows: the rows.
        node_index: per row [T] int64, the node of each of its tokens.
    """

    token_ids: np.ndarray
    position: np.ndarray
    parent: np.ndarray
    subtree_end: np.ndarray
    rows: list[Row]
    node_index: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.token_ids)


def forest(rows: Sequence[Row]) -> Batch:
    """Merge rows into one prefix forest."""
    lists = [row.token_ids.tolist() for row in rows]
    order = sorted(range(len(rows)), key=lists.__getitem__)
    node_index: list[np.ndarray] = [np.empty(0, np.int64)] * len(rows)
    tokens, positions, parents = [], [], []
    end_of: dict[int, int] = {}
    count, previous = 0, np.empty(0, np.int64)
    previous_ids: list[int] = []
    for r in order:
        ids = rows[r].token_ids
        shared = common_prefix(previous_ids, lists[r])
        for node in previous[shared:].tolist():
            end_of[node] = count
        new = np.arange(count, count + len(ids) - shared)
        path = np.concatenate([previous[:shared], new])
        tokens.append(ids[shared:])
        positions.append(np.arange(shared, len(ids)))
        parents.append(np.concatenate([[-1], path[:-1]])[shared:])
        node_index[r], previous, previous_ids = path, path, lists[r]
        count += len(new)
    for node in previous.tolist():
        end_of[node] = count
    subtree_end = np.array([end_of[n] for n in range(count)], np.int64)
    return Batch(
        np.concatenate(tokens), np.concatenate(positions), np.concatenate(parents), subtree_end, list(rows), node_index
    )


def micro_batches(rows: Sequence[Row], budget: int, parts: int = 1) -> list[list[Row]]:
    """Split rows into micro-batches of at most `budget` forest nodes, all rows of a trajectory together.

    Trajectories are taken in the order of their ids, so that shared prefixes fall into the same micro-batch. A
    trajectory larger than the budget gets a micro-batch of its own.

    Args:
        rows: rows of whole trajectories.
        budget: nodes.
        parts: how many cores want to work on them; rows that would fit into fewer micro-batches are shared out.
    """
    trajectories: dict[int, list[Row]] = {}
    for row in rows:
        trajectories.setdefault(row.trajectory_index, []).append(row)
    ordered = sorted(trajectories.values(), key=lambda t: t[0].token_ids.tolist())
    sizes = [sum(map(len, of_trajectory)) for of_trajectory in ordered]
    ids = [[], *(of_trajectory[0].token_ids.tolist() for of_trajectory in ordered)]
    added = [size - common_prefix(*pair) for size, pair in zip(sizes, pairwise(ids), strict=True)]
    starts = np.cumsum(added) - added
    part_of = (starts * parts // max(sum(added), 1)).tolist()
    batches: list[list[Row]] = []
    used, current = 0, 0
    for of_trajectory, size, new, part in zip(ordered, sizes, added, part_of, strict=True):
        if batches and used + new <= budget and part == current:
            batches[-1] += of_trajectory
            used += new
        else:
            batches.append(list(of_trajectory))
            used, current = size, part
    return batches


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading entries that two lists share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the first `low` entries agree, the first `high` do not
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
