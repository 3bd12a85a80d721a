"""Value and gradient of the loss equal a float64 definition, in every mode, on ragged batches with odd groups."""

from __future__ import annotations

import copy
from itertools import product

import numpy as np
import pytest
import torch

from sinkflex.learner.losses import LossInputs
from sinkflex.learner.step import count
from sinkflex.methods.grpo import GRPO
from sinkflex.trajectory import Row
from tests.learner.loss_cases import (
    AGGREGATIONS,
    CORRECTIONS,
    DIVERGENCES,
    MAX_TOKENS,
    SURROGATES,
    Episode,
    brute_force,
)


def episodes(seed: int) -> list[Episode]:
    """Four groups: of three, of one, without variance, and with an episode of a single token."""
    rng = np.random.default_rng(seed)
    made = []
    for group, size in enumerate((3, 1, 2, 2)):
        for member in range(size):
            n = 1 if (group, member) == (3, 0) else int(rng.integers(1, 7))
            behavior = rng.normal(-2, 0.7, n)
            proximal = behavior + rng.normal(0, 0.15, n)
            policy, reference = proximal + rng.normal(0, 0.25, n), behavior + rng.normal(0, 0.3, n)
            advantage = 0.0 if group in (1, 2) else float(rng.normal())
            made.append(Episode(group, advantage, *(x.tolist() for x in (policy, behavior, proximal, reference))))
    return made


def inputs_of(batch: list[Episode], options: dict) -> LossInputs:
    rows = [
        Row(
            *(np.arange(len(e.policy)), np.ones(len(e.policy), bool)),
            *(np.array(x, np.float32) for x in (e.behavior, [e.advantage] * len(e.policy))),
            *(np.zeros(len(e.policy), np.int64) for _ in range(2)),
            group_index=e.group,
            trajectory_index=i,
        )
        for i, e in enumerate(batch)
    ]
    owner = [i for i, e in enumerate(batch) for _ in e.policy]

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for e in batch for x in getattr(e, name)], dtype=torch.float64)

    corrected = options.get("correction", "none") != "none"
    return LossInputs(
        flat("policy").requires_grad_(),
        flat("behavior"),
        torch.tensor([e.advantage for e in batch for _ in e.policy], dtype=torch.float64),
        torch.tensor(owner),
        torch.tensor([owner.count(i) for i in owner]),
        **count(rows, bool(options.get("count_zero_groups")))._asdict(),
        reference_logprobs=flat("reference") if options.get("kl_coefficient") else None,
        proximal_logprobs=flat("proximal") if corrected else None,
    )


def numeric_gradient(batch: list[Episode], options: dict, epsilon: float = 1e-6) -> np.ndarray:
    slopes = []
    for i, episode in enumerate(batch):
        for t in range(len(episode.policy)):
            values = []
            for sign in (1, -1):
                moved = copy.deepcopy(batch)
                moved[i].policy[t] += sign * epsilon
                values.append(brute_force(moved, options, frozen=batch))
            slopes.append((values[0] - values[1]) / (2 * epsilon))
    return np.array(slopes)


@pytest.mark.parametrize(("seed", "aggregation"), list(enumerate(AGGREGATIONS)))
def test_value_and_gradient_equal_the_definition(seed: int, aggregation: str) -> None:
    batch = episodes(seed)
    for surrogate, correction, divergence in product(SURROGATES, CORRECTIONS, DIVERGENCES):
        zero_groups = {"count_zero_groups": True} if seed % 2 else {}
        options = {"aggregation": aggregation, **surrogate, **correction, **divergence, **zero_groups}
        inputs = inputs_of(batch, options)
        loss, _ = GRPO(options, MAX_TOKENS).loss(inputs)
        (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
        assert float(loss.detach()) == pytest.approx(brute_force(batch, options), rel=1e-12), options
        np.testing.assert_allclose(
            gradient, numeric_gradient(batch, options), rtol=1e-6, atol=1e-9, err_msg=f"{options}"
        )


def test_the_cases_reach_every_branch() -> None:
    """Each bound is met by some token and missed by another, or the brute force would prove little."""
    batch = [episode for seed in range(len(AGGREGATIONS)) for episode in episodes(seed)]
    gaps = np.array([p - b for e in batch for p, b in zip(e.proximal, e.behavior, strict=True)])
    means = np.array([np.mean(np.subtract(e.proximal, e.behavior)) for e in batch])
    for correction, values in ((CORRECTIONS[1], gaps), (CORRECTIONS[3], means)):
        weights = np.exp(values)
        low, high = correction["correction_low"], correction["correction_high"]
        assert 0 < np.mean(weights < low) < 1 and 0 < np.mean(weights > high) < 1, correction
    negative = [np.exp(p - x) for e in batch for p, x in zip(e.policy, e.proximal, strict=True) if e.advantage < 0]
    assert max(negative) > 1.2 > min(negative)
