"""Where each method goes in the mean: every pair of episodes of a small chain, weighted by its probability.

In state s the policy advances or stalls. Three advances within seven turns solve the task, so that success is short and
failure long. A turn is one token. With all pairs enumerated, the expected update of a group of two is exact, and can be
laid beside the gradient of the expected reward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from sinkflex.methods.method import build_method
from sinkflex.methods.tara import turn_advantages
from sinkflex.trajectory import Group, Trajectory
from tests.methods.episodes import episode, turn

GOAL, LIMIT = 3, 7
ADVANCE = 1
LOGITS = np.array([[1.0, -0.5], [0.4, 0.0], [-1.5, 1.0]])  # [state, action]

Step = tuple[int, int]  # state, action
Credit = Callable[[list["Play"]], list[np.ndarray]]
Divisor = Callable[[list["Play"]], int]


class Play:
    """One possible episode: its steps, probability, and reward."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
        self.probability = float(np.prod([p[s, a] for s, a in steps]))
        self.reward = float(sum(a == ADVANCE for _, a in steps) == GOAL)
        self.scores = [np.eye(2)[a] - p[s] for s, a in steps]

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        """Sum over steps of weight times grad log pi, [state, action]."""
        total = np.zeros(LOGITS.shape)
        for (state, _), score, weight in zip(self.steps, self.scores, weights, strict=True):
            total[state] += weight * score
        return total

    def trajectory(self, member: int) -> Trajectory:
        return episode([turn(1) for _ in self.steps], self.reward, member)


def plays() -> list[Play]:
    found = {}
    for actions in product((0, 1), repeat=LIMIT):
        state, steps = 0, []
        for action in actions:
            if state == GOAL:
                break
            steps.append((state, action))
            state += action == ADVANCE
        found[tuple(steps)] = Play(steps)
    return list(found.values())


PLAYS = plays()
TRUTH = sum(play.probability * play.gradient(np.full(len(play.steps), play.reward)) for play in PLAYS)


def expected(credit: Credit, divisor: Divisor) -> np.ndarray:
    """The expected update of a group of two."""
    total = np.zeros(LOGITS.shape)
    for pair in product(PLAYS, repeat=2):
        both = list(pair)
        update = sum(play.gradient(a) for play, a in zip(both, credit(both), strict=True))
        total += both[0].probability * both[1].probability * update / divisor(both)
    return total


def cosine(update: np.ndarray) -> float:
    return float((update * TRUTH).sum() / np.linalg.norm(update) / np.linalg.norm(TRUTH))


def of_method(name: str, **options: object) -> Credit:
    method = build_method(name, dict(options), 100)
    return lambda both: method.advantages(Group("t", [play.trajectory(i) for i, play in enumerate(both)]))


def tara(both: list[Play]) -> list[np.ndarray]:
    """Turn k is the k-th advance, with the stalls before it."""
    r = np.array([[k < sum(a == ADVANCE for _, a in play.steps) for k in range(GOAL)] for play in both], float)
    table = turn_advantages(r, 0.5, 0.5)
    return [np.array([row[state] for state, _ in play.steps]) for row, play in zip(table, both, strict=True)]


def episodes(both: list[Play]) -> int:
    return len(both)


def tokens(both: list[Play]) -> int:
    return sum(len(play.steps) for play in both)


def test_probabilities_of_all_episodes_sum_to_one() -> None:
    assert sum(play.probability for play in PLAYS) == pytest.approx(1)
    assert len({len(play.steps) for play in PLAYS if play.reward}) == LIMIT - GOAL + 1 and len(PLAYS) == 64


def test_centered_rewards_summed_over_an_episode_go_exactly_where_the_reward_grows() -> None:
    update = expected(of_method("grpo", advantage_scale="none"), episodes)
    np.testing.assert_allclose(update, TRUTH / 2, atol=1e-7)  # (G - 1) / G of it: a sibling is in its own baseline
    copied = expected(of_method("stepo", advantage_scale="none", turn_weight="copy"), episodes)
    np.testing.assert_allclose(copied, update, atol=1e-7)


@pytest.mark.parametrize(
    ("credit", "divisor", "least", "most"),
    [
        (of_method("grpo"), tokens, 0.5, 0.999999),
        (of_method("stepo", turn_weight="copy"), tokens, 0.5, 0.999999),
        (of_method("stepo"), episodes, 0.5, 0.999999),
        (tara, tokens, 0.5, 0.99999),
    ],
    ids=["grpo, token mean", "naive, by step samples", "stepo", "tara"],
)
def test_each_method_climbs_and_none_of_these_is_unbiased(
    credit: Credit, divisor: Divisor, least: float, most: float
) -> None:
    value = cosine(expected(credit, divisor))
    print(f"cosine {value:.4f}")
    assert least < value < most


def test_with_long_failures_stepo_is_the_gradient_weighted_by_inverse_lengths() -> None:
    update = expected(of_method("stepo", advantage_scale="none"), episodes)
    mean = sum(play.probability * play.reward for play in PLAYS)
    weighted = sum(
        play.probability * play.gradient(np.full(len(play.steps), (play.reward - mean) / len(play.steps)))
        for play in PLAYS
    )
    np.testing.assert_allclose(update, weighted / 2, atol=1e-7)
