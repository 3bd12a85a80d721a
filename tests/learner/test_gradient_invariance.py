"""In every mode of the loss: the gradient of a step does not depend on how its rows are laid out or shared out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sinkflex.config import LearnerConfig
from sinkflex.learner.step import PROXIMAL, Learner, Needs, count
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.gspo import GSPO
from sinkflex.methods.method import Method
from sinkflex.trajectory import Row
from tests.learner.loss_cases import CORRECTIONS, MAX_TOKENS, MODES
from tests.learner.test_step import some_rows
from tests.policy.tiny_policy import tiny_policy

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(checkpoint_layers=False), 1, 1.0)


@cache
def reference() -> PreTrainedModel:
    """A model near the policy, as a reference is."""
    model, generator = copy.deepcopy(tiny_policy().model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def rows(learner: Learner) -> list[Row]:
    return rows_near_the_policy(learner)


def rows_near_the_policy(learner: Learner) -> list[Row]:
    """Eight trajectories: shared prompts, a group without advantage, one sampled token alone."""
    made = [replace(row, group_index=3) if row.trajectory_index >= 6 else row for row in some_rows()]
    made[5] = replace(made[5], loss_mask=np.arange(len(made[5])) == len(made[5]) - 1)
    learner.recompute(made)
    rng = np.random.default_rng(0)
    for i, row in enumerate(made):
        policy = row.streams[PROXIMAL]
        noise = [np.where(row.loss_mask, rng.normal(0, scale, len(row)), 0) for scale in (0.2, 0.2)]
        row.streams[PROXIMAL] = (policy + noise[0]).astype(np.float32)
        advantages = np.zeros(len(row)) if row.group_index == 3 else row.advantages
        made[i] = replace(
            row,
            behavior_logprobs=np.where(row.loss_mask, policy + noise[0] + noise[1], 0).astype(np.float32),
            advantages=np.where(row.loss_mask, advantages, 0).astype(np.float32),
        )
    return made


def gradient(learner: Learner, shares: Sequence[Sequence[Row]], method: Method) -> torch.Tensor:
    """The sum of the gradients of the shares, each computed apart as one rank or one micro-batch would."""
    needs = Needs(
        entropy=method.needs_entropy,
        reference=reference() if method.needs_reference else None,
        proximal=method.options.correction != "none",
    )
    every = [row for share in shares for row in share]
    counts = count(every, method.options.count_zero_groups)
    learner.optimizer.zero_grad(set_to_none=True)
    for share in shares:
        learner.accumulate(share, method.loss, needs, counts)
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


def split(row: Row) -> list[Row]:
    """The row twice, each training one half of its sampled ids."""
    half = row.loss_mask & (np.cumsum(row.loss_mask) % 2 == 0)
    masks = [mask for mask in (half, row.loss_mask & ~half) if mask.any()]
    return [replace(row, loss_mask=mask, advantages=np.where(mask, row.advantages, 0)) for mask in masks]


def padded(row: Row, tokens: int) -> Row:
    """The row with tokens behind it that nobody sampled."""
    arrays = ("token_ids", "loss_mask", "behavior_logprobs", "advantages", "policy_version", "turn_index")
    longer = {name: np.pad(getattr(row, name), (0, tokens)) for name in arrays}
    return replace(row, **longer, streams={k: np.pad(v, (0, tokens)) for k, v in row.streams.items()})


METHODS: list[Method] = [*(GRPO(mode, MAX_TOKENS) for mode in MODES), *(GSPO(c, MAX_TOKENS) for c in CORRECTIONS)]


def name_of(method: Method) -> str:
    chosen = method.options.model_dump(exclude_unset=True)
    words = [type(method).__name__, *(value for value in chosen.values() if isinstance(value, str))]
    return "-".join([*words, "kl"] if "kl_coefficient" in chosen else words)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_the_gradient_is_the_same_however_the_rows_lie(method: Method, learner: Learner, rows: list[Row]) -> None:
    expected = gradient(learner, [rows], method)
    assert float(expected.norm()) > 0
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    layouts = {
        "one trajectory a micro-batch": [[row] for row in rows],
        "two": [rows[i : i + 2] for i in range(0, 8, 2)],
        "four": [rows[:4], rows[4:]],
        "another order": [[rows[i] for i in order]],
        "two ranks": [rows[0::2], rows[1::2]],
        "four ranks": [rows[rank::4] for rank in range(4)],
        "episodes cut into rows": [[part for row in rows for part in split(row)]],
        "padded rows": [[padded(row, 3 + i) for i, row in enumerate(rows)]],
    }
    differences = {
        name: float((gradient(learner, shares, method) - expected).norm() / expected.norm())
        for name, shares in layouts.items()
    }
    assert max(differences.values()) <= TOLERANCE, differences
