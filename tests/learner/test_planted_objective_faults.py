"""Each public bug of objectives and advantages, planted here: the named test of this suite must notice it.

`tests/test_planted_list.py` holds the list of all planted faults, by public report.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sinkflex.config import LearnerConfig
from sinkflex.learner import losses, step
from sinkflex.learner.losses import LossInputs, aggregate
from sinkflex.learner.packing import forest
from sinkflex.learner.step import Learner, Needs, count
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.method import Method
from sinkflex.policy import model as model_module
from sinkflex.trajectory import Group
from tests.learner import test_gradient_invariance as invariance
from tests.learner import test_losses as loss_tests
from tests.learner import test_losses_by_brute_force as brute_force
from tests.learner import test_step as step_tests
from tests.learner.test_step import some_rows
from tests.methods import test_grpo as grpo_tests
from tests.policy import test_prepared_models as model_tests
from tests.policy.tiny_policy import tiny_policy

Patch = pytest.MonkeyPatch
FAULTS: dict[str, tuple[Callable[..., object], Callable[[Patch], object]]] = {}


def noticed_by(test: Callable[..., object]) -> Callable[[Callable[[Patch], object]], Callable]:
    def register(plant: Callable[[Patch], object]) -> Callable:
        FAULTS[plant.__name__] = (test, plant)
        return plant

    return register


def paid(patch: Patch, values: Callable[[Group], list[float]]) -> None:
    """Let a method pay each valid member so much a token."""
    patch.setattr(
        Method,
        "advantages",
        lambda self, group: [
            np.full(t.sampled_tokens, a, np.float32) for t, a in zip(group.valid, values(group), strict=True)
        ],
    )


def the_kl_of_a_policy_to_itself_is_zero_at_any_temperature() -> None:
    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(), 1, temperature=1.3)
    rows = some_rows(2)
    found = learner.loss_inputs(learner.model, forest(rows), Needs(reference=tiny_policy().model), count(rows, True))
    assert found.reference_logprobs is not None
    torch.testing.assert_close(found.policy_logprobs.detach(), found.reference_logprobs, rtol=0, atol=1e-5)


def test_the_kl_of_a_policy_to_itself_is_zero_at_any_temperature() -> None:
    the_kl_of_a_policy_to_itself_is_zero_at_any_temperature()


@noticed_by(the_kl_of_a_policy_to_itself_is_zero_at_any_temperature)
def the_reference_is_scored_at_temperature_1(patch: Patch) -> None:
    original = step.node_logprobs

    def raw(model: Any, batch: Any, nodes: Any, temperature: float, *rest: Any) -> Any:
        return original(model, batch, nodes, 1.0 if model is tiny_policy().model else temperature, *rest)

    patch.setattr(step, "node_logprobs", raw)


@noticed_by(grpo_tests.test_episodes_count_once_however_long_they_are)
def a_long_episode_votes_once_a_token(patch: Patch) -> None:
    def values(group: Group) -> list[float]:
        rewards, lengths = ([getattr(t, name) for t in group.valid] for name in ("reward", "sampled_tokens"))
        return [r - float(np.average(rewards, weights=lengths)) for r in rewards]

    paid(patch, values)


@noticed_by(lambda: grpo_tests.test_a_group_of_one_or_without_variance_has_advantage_zero([0.7]))
def a_group_of_one_is_paid_its_reward(patch: Patch) -> None:
    paid(patch, lambda group: [float(t.reward or 0) for t in group.valid])


@noticed_by(grpo_tests.test_an_invalid_member_moves_no_sibling_and_gets_nothing)
def a_broken_episode_counts_as_reward_0_in_the_baseline(patch: Patch) -> None:
    def values(group: Group) -> list[float]:
        mean = np.mean([t.reward or 0.0 for t in group.members])
        return [float((t.reward or 0.0) - mean) for t in group.valid]

    paid(patch, values)


@noticed_by(
    lambda: loss_tests.test_noise_of_the_engines_leaves_the_mean_weight_at_1_at_any_length("trajectory_mask", 8_000)
)
def log_weights_are_summed_over_an_episode(patch: Patch) -> None:
    original = losses.trajectory_mean
    patch.setattr(losses, "trajectory_mean", lambda values, inputs: original(values * inputs.trajectory_tokens, inputs))


@noticed_by(lambda: step_tests.test_the_gradient_does_not_depend_on_the_micro_batch(40))
def a_micro_batch_divides_by_its_own_tokens(patch: Patch) -> None:
    patch.setattr("sinkflex.methods.method.aggregate", lambda values, *_, **__: values.mean())


@noticed_by(lambda: invariance_in("sequence_mean"))
def a_micro_batch_divides_by_its_own_trajectories(patch: Patch) -> None:
    def own(values: torch.Tensor, inputs: LossInputs, *rest: Any, **named: Any) -> torch.Tensor:
        return aggregate(values, replace(inputs, trajectories=len(inputs.trajectory.unique())), *rest, **named)

    patch.setattr("sinkflex.methods.method.aggregate", own)


@noticed_by(lambda: invariance_in("sequence_mean"))
def a_row_is_taken_for_an_episode(patch: Patch) -> None:
    original = Learner.loss_inputs

    def per_row(self: Learner, model: Any, batch: Any, *rest: Any) -> LossInputs:
        lengths = torch.tensor([int(row.loss_mask.sum()) for row in batch.rows])
        return replace(original(self, model, batch, *rest), trajectory_tokens=lengths.repeat_interleave(lengths))

    patch.setattr(Learner, "loss_inputs", per_row)


@noticed_by(step_tests.test_groups_without_advantage_add_nothing_and_are_skipped)
def groups_without_advantage_count_in_the_denominators(patch: Patch) -> None:
    patch.setattr(step, "count", lambda rows, _: count(rows, True))


@noticed_by(step_tests.test_groups_without_advantage_keep_their_kl)
def the_kl_is_divided_by_the_groups_that_teach(patch: Patch) -> None:
    patch.setattr(
        "sinkflex.methods.method.aggregate",
        lambda values, inputs, mode, constant=1, _=False: aggregate(values, inputs, mode, constant),
    )


@noticed_by(lambda: brute_force.test_value_and_gradient_equal_the_definition(0, "token_mean"))
def a_clip_range_has_one_width(patch: Patch) -> None:
    original = losses.clipped_surrogate
    patch.setattr(
        "sinkflex.methods.method.clipped_surrogate",
        lambda inputs, low, high, dual=0.0: original(inputs, low, low, dual),
    )


@noticed_by(lambda: brute_force.test_value_and_gradient_equal_the_definition(0, "token_mean"))
def the_ratio_counts_the_mismatch_too(patch: Patch) -> None:
    """A weight of proximal over behavior, and a ratio that still starts at the behavior policy."""
    patch.setattr(LossInputs, "log_ratio", property(lambda self: self.policy_logprobs - self.behavior_logprobs))


@noticed_by(loss_tests.test_k3_is_zero_at_equality_never_negative_and_finite_far_away)
def k3_is_not_bounded(patch: Patch) -> None:
    patch.setattr(loss_tests, "kl_k3", lambda p, r: (r - p).exp() - 1 - (r - p))


@noticed_by(lambda: loss_tests.test_the_mean_gradient_of_a_kl_estimate_is_the_one_it_claims("k1", False))
def k1_is_a_plain_loss(patch: Patch) -> None:
    patch.setattr(loss_tests, "kl_estimate", lambda inputs, _: inputs.policy_logprobs - inputs.reference_logprobs)


@noticed_by(model_tests.test_dropout_kept_as_plain_numbers_is_off)
def dropout_is_left_on(patch: Patch) -> None:
    patch.setattr(model_module, "setattr", lambda *_: None, raising=False)
    assert model_module.setattr is not builtins.setattr  # type: ignore[attr-defined]


def invariance_in(aggregation: str) -> None:
    """The invariance of gradients in one mode of the loss, as its own test holds it."""
    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(checkpoint_layers=False), 1, 1.0)
    rows = invariance.rows_near_the_policy(learner)
    method = GRPO({"aggregation": aggregation}, 64)
    invariance.test_the_gradient_is_the_same_however_the_rows_lie(method, learner, rows)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    test, plant = FAULTS[name]
    arguments = [tmp_path] if test is model_tests.test_dropout_kept_as_plain_numbers_is_off else []
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test(*arguments)
