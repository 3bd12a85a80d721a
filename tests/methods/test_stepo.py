from __future__ import annotations

import numpy as np
import pytest
import torch

from sinkflex.learner.rows import rows_of
from sinkflex.methods.method import build_method
from sinkflex.train import mini_batches
from sinkflex.trajectory import Group
from tests.methods.episodes import group, loss_inputs


def random_group(seed: int, size: int = 6) -> Group:
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 6, rng.integers(1, 21)).tolist() for _ in range(size)]
    rewards = rng.integers(0, 2, size).astype(float)
    rewards[:2] = 0.0, 1.0
    return group(lengths, rewards.tolist())


def by_turn(g: Group, advantages: list[np.ndarray]) -> list[list[float]]:
    """The sum over the tokens of each turn."""
    cuts = [np.cumsum([len(turn.action_ids) for turn in t.turns])[:-1] for t in g.valid]
    return [[float(part.sum()) for part in np.split(a, cut)] for a, cut in zip(advantages, cuts, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_an_episode_sums_up_to_its_advantage_and_a_group_to_zero(seed: int) -> None:
    g = random_group(seed)
    whole = [float(a[0]) for a in build_method("grpo", {}, 100).advantages(g)]
    shared = by_turn(g, build_method("stepo", {}, 100).advantages(g))
    np.testing.assert_allclose([sum(of_turns) for of_turns in shared], whole, rtol=1e-4)
    assert sum(map(sum, shared)) == pytest.approx(0, abs=1e-4)
    for of_turns in shared:
        np.testing.assert_allclose(of_turns, of_turns[0], rtol=1e-4)


def test_doubling_the_turns_of_an_episode_halves_the_weight_of_each() -> None:
    stepo = build_method("stepo", {}, 100)
    short, long = group([[3, 2], [4]], [1.0, 0.0]), group([[3, 2, 3, 2], [4]], [1.0, 0.0])
    once, twice = by_turn(short, stepo.advantages(short)), by_turn(long, stepo.advantages(long))
    np.testing.assert_allclose(np.array(twice[0]) * 2, [once[0][0]] * 4, rtol=1e-5)


def test_the_plain_broadcast_weighs_an_episode_by_its_turns() -> None:
    g = group([[2] * 10, [2]], [0.0, 1.0])
    copied = by_turn(g, build_method("stepo", {"turn_weight": "copy"}, 100).advantages(g))
    whole = [float(a[0]) for a in build_method("grpo", {}, 100).advantages(g)]
    # Step by step, as a trainer does that copies an episode's advantage to each of its step samples.
    np.testing.assert_allclose(copied[0], [whole[0]] * 10, rtol=1e-5)
    np.testing.assert_allclose(copied[1], [whole[1]], rtol=1e-5)
    assert sum(map(sum, copied)) == pytest.approx(10 * whole[0] + whole[1], rel=1e-4)


def test_the_loss_is_the_mean_over_episodes_of_sums_over_turns_of_token_means() -> None:
    g = group([[3, 1], [2], [1, 1, 4]], [1.0, 0.0, 0.5])
    stepo = build_method("stepo", {}, 100)
    rng = torch.Generator().manual_seed(0)
    sizes = [t.sampled_tokens for t in g.valid]
    behavior = [-torch.rand(n, generator=rng, dtype=torch.float64) for n in sizes]
    policy = [b + 0.4 * torch.randn(len(b), generator=rng, dtype=torch.float64) for b in behavior]
    whole = [float(a[0]) for a in build_method("grpo", {}, 100).advantages(g)]
    wanted = 0.0
    for t, p, b, a in zip(g.valid, policy, behavior, whole, strict=True):
        at = 0
        for turn in t.turns:
            ratio = (p - b)[at : at + len(turn.action_ids)].exp()
            share = a / len(t.turns)
            wanted -= float(torch.minimum(ratio * share, ratio.clamp(0.8, 1.28) * share).mean()) / len(g.valid)
            at += len(turn.action_ids)
    advantages = [torch.from_numpy(a).double() for a in stepo.advantages(g)]
    assert float(stepo.loss(loss_inputs(policy, behavior, advantages))[0]) == pytest.approx(wanted, rel=1e-5)


def test_switched_off_it_is_grpo_to_the_bit() -> None:
    g = random_group(1)
    off = build_method("stepo", {"turn_weight": "none", "aggregation": "token_mean", "clip_high": 0.2}, 100)
    plain = build_method("grpo", {}, 100)
    for a, b in zip(off.advantages(g), plain.advantages(g), strict=True):
        assert a.tobytes() == b.tobytes()
    p = [torch.randn(4), torch.randn(3)]
    inputs = loss_inputs(p, [x + 0.1 for x in p], [torch.ones(4), -torch.ones(3)])
    assert torch.equal(off.loss(inputs)[0], plain.loss(inputs)[0])


def test_mini_batches_of_whole_groups_sum_to_zero_and_fixed_counts_of_turns_do_not() -> None:
    groups = [random_group(seed) for seed in range(4)]
    stepo = build_method("stepo", {}, 100)
    rows = rows_of(groups, [stepo.advantages(g) for g in groups])
    for part in mini_batches(rows, 2):
        assert sum(float(row.advantages.sum()) for row in part) == pytest.approx(0, abs=1e-3)
    turns = [share for g in groups for of in by_turn(g, stepo.advantages(g)) for share in of]
    slices = np.array_split(np.array(turns), 4)
    assert max(abs(part.sum()) for part in slices) > 0.1
