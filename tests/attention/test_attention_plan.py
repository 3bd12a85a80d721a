"""Plans: the constructors agree with the rule, pieces cover it exactly once, mistakes are told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkflex.attention.plan import Plan
from sinkflex.attention.reference import visible


def covered(plan: Plan, window: int | None) -> torch.Tensor:
    """How many pieces hold each (query, key) pair."""
    count = torch.zeros(len(plan), len(plan), dtype=torch.int)
    for piece in plan.pieces(window):
        keys = np.concatenate([np.arange(*span) for span in piece.keys])
        above = len(keys) - (piece.stop - piece.start)
        assert not piece.causal or above >= 0
        for row, query in enumerate(range(piece.start, piece.stop)):
            stop = above + row + 1 if piece.causal else len(keys)
            start = max(0, stop - piece.window) if piece.window else 0
            count[query, keys[start:stop]] += 1
    return count


@settings(max_examples=200, deadline=None)
@given(plan=plans(), window=st.sampled_from([None, 1, 2, 3, 8, 50]))
def test_pieces_cover_every_visible_pair_exactly_once(plan: Plan, window: int | None) -> None:
    assert torch.equal(covered(plan, window), visible(plan, window).int())


@settings(max_examples=50, deadline=None)
@given(plan=plans())
def test_every_real_token_starts_in_exactly_one_piece(plan: Plan) -> None:
    for window in (None, 3):
        starts = np.zeros(len(plan), dtype=int)
        for piece in plan.pieces(window):
            starts[piece.start : piece.stop] += piece.first
        assert (starts == (plan.subtree_end > np.arange(len(plan)))).all()


def test_a_shared_prompt_with_two_answers_by_hand() -> None:
    plan = Plan.tree([-1, 0, 1, 2, 2, 4])  # prompt 0 1 2, answer 3, answer 4 5
    assert plan.subtree_end.tolist() == [6, 6, 6, 4, 6, 6]
    assert plan.position.tolist() == [0, 1, 2, 3, 3, 4]
    seen = visible(plan).int().tolist()
    assert seen[3] == [1, 1, 1, 1, 0, 0]
    assert seen[5] == [1, 1, 1, 0, 1, 1]
    assert visible(plan, window=2).int().tolist()[4] == [0, 0, 1, 0, 1, 0]
    assert [(run.start, run.stop, run.path) for run in plan.runs] == [(0, 4, ()), (4, 6, ((0, 3),))]


def test_answers_of_one_prompt_meet_it_in_one_piece() -> None:
    parent = [*range(-1, 9), 9, 10, 9, 12, 9, 14]
    rectangles = [piece for piece in Plan.tree(parent).pieces() if not piece.causal]
    assert [(piece.start, piece.stop, piece.keys) for piece in rectangles] == [(12, 16, ((0, 10),))]


def test_a_padded_batch_equals_its_documents() -> None:
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    plan = Plan.padded(mask)
    assert plan.subtree_end.tolist() == [0, 1, 4, 4, 7, 7, 7, 7, 8, 9, 10, 11]
    assert Plan.from_lengths([3, 2], tokens=7).subtree_end.tolist() == [3, 3, 3, 5, 5, 5, 6]


def test_equal_plans_share_their_pieces() -> None:
    first, second = Plan.from_lengths([5, 7]), Plan.from_lengths([5, 7])
    assert first == second and hash(first) == hash(second)
    assert first.pieces(4) is second.pieces(4)
    assert first != Plan.from_lengths([5, 7], prefix_tokens=1)
    assert first != Plan.from_lengths([7, 5])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Plan([]), "expected \\[N\\]"),
        (lambda: Plan([3, 2]), "subtree_end\\[0\\] is 3"),
        (lambda: Plan([1, 0]), "subtree_end\\[1\\] is 0"),
        (lambda: Plan([2, 3, 3]), "crosses another subtree"),
        (lambda: Plan([3, 1, 3]), "padding inside"),
        (lambda: Plan([1], prefix_tokens=-1), "prefix_tokens"),
        (lambda: Plan.from_lengths([3, 4], tokens=6), "add up to 7"),
        (lambda: Plan.from_lengths([3, -1]), "no negative"),
        (lambda: Plan.padded(np.array([[1, 0, 1]])), "row 0 has real tokens on both sides"),
        (lambda: Plan.padded(np.array([1, 1])), "expected \\[B, T\\]"),
        (lambda: Plan.tree([-1, 2, 0]), "parent of token 1 is 2"),
        (lambda: Plan.tree([-1, 0, -1, 0]), "depth-first"),
        (lambda: Plan.causal(3).pieces(0), "window is 0"),
    ],
)
def test_mistakes_are_told(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
