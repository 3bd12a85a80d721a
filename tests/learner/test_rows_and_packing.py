from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkflex.attention.plan import Plan
from sinkflex.envs.env import Action, StopReason
from sinkflex.learner.packing import forest, micro_batches
from sinkflex.learner.rows import beginning, cut, rows_of
from sinkflex.trajectory import Group, Outcome, Row, Trajectory, Turn


def trajectory(turns: list[tuple[list[int], list[int], bool]]) -> Trajectory:
    return Trajectory(
        "t",
        0,
        [Turn(p, a, [-0.1 * i for i in a], 3, Action(text="x"), forks=f) for p, a, f in turns],
        Outcome.FAILED,
        StopReason.USER_STOP,
        0.0,
    )


def vars_of(row: Row) -> dict[str, np.ndarray]:
    arrays = {f.name: getattr(row, f.name) for f in fields(row) if isinstance(getattr(row, f.name), np.ndarray)}
    return {**arrays, **row.streams}


def plain_row(ids: list[int], index: int = 0, sampled: list[bool] | None = None) -> Row:
    n = len(ids)
    mask = np.array(sampled if sampled is not None else [False] + [True] * (n - 1))
    return Row(
        np.array(ids),
        mask,
        np.zeros(n, np.float32),
        mask.astype(np.float32),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        0,
        index,
    )


def test_a_trajectory_without_forks_is_one_row_with_every_id_in_its_place() -> None:
    (row,) = cut(trajectory([([1, 2], [3, 4], False), ([5], [6], False)]), np.array([1, 2, 3], np.float32), 7, 9)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True]
    assert row.advantages.tolist() == [0, 0, 1, 2, 0, 3]
    assert row.turn_index.tolist() == [0, 0, 0, 0, 1, 1]
    assert row.policy_version.tolist() == [-1, -1, 3, 3, -1, 3]
    np.testing.assert_allclose(row.behavior_logprobs, [0, 0, -0.3, -0.4, 0, -0.6], rtol=1e-6)
    assert (row.group_index, row.trajectory_index) == (7, 9)


def test_a_beginning_is_whole_turns_of_every_array_and_of_every_stream() -> None:
    record = trajectory([([1, 2], [3], False), ([4], [5, 6], False), ([7], [8], False)])
    (row,) = cut(record, np.arange(4, dtype=np.float32), 2, 5)
    row.streams["teacher"] = np.arange(len(row), dtype=np.float32)
    first = beginning(row, 2)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and first.advantages.tolist() == [0, 0, 0, 0, 1, 2]
    assert {len(values) for values in vars_of(first).values()} == {6} and first.streams["teacher"].tolist()[-1] == 5
    assert (first.group_index, first.trajectory_index) == (2, 5)
    assert len(beginning(row, 9)) == len(row) and len(beginning(row, 0)) == 0


def test_a_row_after_a_fork_has_no_beginning_before_its_first_turn() -> None:
    _, later = cut(trajectory([([1], [2], False), ([3], [4], True)]), np.zeros(2, np.float32), 0, 0)
    assert len(beginning(later, 1)) == 0 and beginning(later, 2).token_ids.tolist() == [3, 4]


def test_a_fork_opens_a_new_row_and_every_sampled_id_is_trained_exactly_once() -> None:
    record = trajectory([([1], [2], False), ([3], [4, 5], False), ([1, 9, 9], [6], True), ([7], [8], False)])
    rows = cut(record, np.arange(5, dtype=np.float32), 0, 0)
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 5], [1, 9, 9, 6, 7, 8]]
    trained = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    assert trained.tolist() == [2, 4, 5, 6, 8]
    assert np.concatenate([row.advantages[row.loss_mask] for row in rows]).tolist() == [0, 1, 2, 3, 4]


def test_invalid_members_give_no_row() -> None:
    good, bad = trajectory([([1], [2], False)]), trajectory([([1], [3], False)])
    bad.outcome, bad.reward = Outcome.INVALID, None
    rows = rows_of([Group("t", [bad, good])], [[np.ones(1, np.float32)]])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2]]


def test_a_forest_of_two_rows_by_hand() -> None:
    batch = forest([plain_row([1, 2, 3]), plain_row([1, 2, 4, 5], 1)])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.parent.tolist() == [-1, 0, 1, 1, 3]
    assert batch.position.tolist() == [0, 1, 2, 2, 3]
    assert batch.subtree_end.tolist() == [5, 5, 3, 5, 5]
    assert [index.tolist() for index in batch.node_index] == [[0, 1, 2], [0, 1, 3, 4]]


ids = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


@given(ids)
def test_every_row_is_a_path_of_the_forest_and_no_prefix_is_stored_twice(rows: list[list[int]]) -> None:
    batch = forest([plain_row(row, i) for i, row in enumerate(rows)])
    for row, index in zip(rows, batch.node_index, strict=True):
        assert batch.token_ids[index].tolist() == row
        assert batch.parent[index].tolist() == [-1, *index[:-1].tolist()]
        assert batch.position[index].tolist() == list(range(len(row)))
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(batch) == len(prefixes)
    assert Plan(batch.subtree_end).position.tolist() == batch.position.tolist()


def test_rows_for_several_processes_are_shared_out_evenly() -> None:
    rows = [plain_row([1, 2, 3, *range(10 * i, 10 * i + 7)], i) for i in range(1, 13)]
    alone = micro_batches(rows, 10_000)
    assert len(alone) == 1
    for parts in (2, 3, 4):
        shared = micro_batches(rows, 10_000, parts)
        sizes = [len(forest(part)) for part in shared]
        assert len(sizes) == parts and max(sizes) <= len(forest(rows)) // parts + 10
        assert sorted(id(row) for part in shared for row in part) == sorted(map(id, rows))
    assert len(micro_batches(rows, 20, 2)) == len(micro_batches(rows, 20)), "the budget still holds"


@given(ids, st.integers(1, 30))
def test_micro_batches_hold_every_row_once_within_the_budget(rows: list[list[int]], budget: int) -> None:
    parts = micro_batches([plain_row(row, i // 2) for i, row in enumerate(rows)], budget)
    seen = sorted(tuple(row.token_ids.tolist()) for part in parts for row in part)
    assert seen == sorted(map(tuple, rows))
    for part in parts:
        assert len({row.trajectory_index for row in part}) == 1 or len(forest(part)) <= budget
    homes = [{row.trajectory_index for row in part} for part in parts]
    assert sum(map(len, homes)) == len(set().union(*homes)), "a trajectory is split over micro-batches"


@pytest.mark.parametrize("advantages", [[0.5], [0.5] * 4, [[0.5] * 3]])
def test_an_episode_with_too_few_or_too_many_advantages_is_refused_with_what_is_expected(advantages) -> None:
    group = Group("t", [trajectory([([1, 2], [3, 4, 5], False)])])
    with pytest.raises(ValueError, match=r"an episode of 3 sampled tokens; expected one each.*np\.full"):
        rows_of([group], [[np.array(advantages, np.float32)]])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_advantages_that_are_no_numbers_are_refused_with_the_task_they_are_of(wrong: float) -> None:
    group = Group("t", [trajectory([([1, 2], [3, 4, 5], False)])])
    with pytest.raises(ValueError, match=r"task t, member 0: 1 of 3 advantages are nan or inf.* finite ones"):
        rows_of([group], [[np.array([0.5, wrong, 0.5], np.float32)]])
