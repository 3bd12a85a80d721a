"""The gradient of a step does not depend on how its rows are padded, packed, ordered or cut."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sinkflex.config import LearnerConfig
from sinkflex.learner.logprobs import plain_head
from sinkflex.learner.step import Learner, Needs, count
from sinkflex.methods.grpo import GRPO
from sinkflex.trajectory import Row
from tests.policy.tiny_policy import tiny_policy

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def some_rows(count: int = 8, seed: int = 0) -> list[Row]:
    """Rows of `count` trajectories in groups of 4 that share prompts, with several sampled stretches each."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt = np.random.default_rng([seed, i // 4]).integers(2, 300, 12)
        ids = np.concatenate([prompt, rng.integers(2, 300, int(rng.integers(1, 25)))])
        mask = np.zeros(len(ids), bool)
        mask[12:] = rng.random(len(ids) - 12) < 0.7
        mask[-1] = True
        rows.append(
            Row(
                ids,
                mask,
                np.where(mask, rng.normal(-6, 0.5, len(ids)), 0).astype(np.float32),
                np.where(mask, rng.normal(), 0).astype(np.float32),
                np.zeros(len(ids), np.int64),
                np.zeros(len(ids), np.int64),
                i // 4,
                i,
            )
        )
    return rows


def gradient(
    rows: Sequence[Row], budget: int = 10_000, needs: Needs | None = None, checkpoint: bool = False, **options: object
) -> torch.Tensor:
    """Return the gradient of one update as one vector; the weights are thrown away."""
    model = copy.deepcopy(tiny_policy().model)
    config = LearnerConfig(micro_batch_tokens=budget, clip_norm=1e9, checkpoint_layers=checkpoint)
    learner = Learner(model, config, 1, 1.0)
    method = GRPO({"kl_coefficient": 0.0, **options}, 64)
    learner.update(rows, method.loss, needs or Needs(), method.options.count_zero_groups)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def assert_equal(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert float((a - b).norm() / a.norm()) < tolerance


def reference_gradient(rows: Sequence[Row], **options: object) -> torch.Tensor:
    """Each row alone, eager attention, float64, dense logits: nothing shared with the learner but the loss formula."""
    model: PreTrainedModel = copy.deepcopy(tiny_policy().model).double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    chosen = GRPO(options, 64).options
    tokens = sum(int(r.loss_mask.sum()) for r in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = model(input_ids=torch.tensor(row.token_ids)[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row.token_ids)[1:, None])[:, 0]
        mask = torch.tensor(row.loss_mask[1:])
        ratio = (logprobs[mask] - torch.tensor(row.behavior_logprobs[1:])[mask].double()).exp()
        advantage = torch.tensor(row.advantages[1:])[mask].double()
        value = -torch.minimum(
            ratio * advantage, ratio.clamp(1 - chosen.clip_low, 1 + chosen.clip_high) * advantage
        ).sum()
        weight = {
            "token_mean": 1 / tokens,
            "sequence_mean": 1 / (int(mask.sum()) * len(rows)),
            "constant": 1 / (64 * len(rows)),
        }[chosen.aggregation]
        total = total + weight * value
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_equals_a_float64_reference_that_shares_no_code(aggregation: str) -> None:
    rows = some_rows()
    assert_equal(reference_gradient(rows, aggregation=aggregation), gradient(rows, aggregation=aggregation), 1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("budget", [1, 40, 90])
def test_the_gradient_does_not_depend_on_the_micro_batch(aggregation: str, budget: int) -> None:
    rows = some_rows()
    assert_equal(gradient(rows, aggregation=aggregation), gradient(rows, budget, aggregation=aggregation))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_the_order_of_rows(aggregation: str) -> None:
    rows = some_rows()
    assert_equal(gradient(rows, aggregation=aggregation), gradient(rows[::-1], aggregation=aggregation))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_splitting_an_episode_into_rows_changes_no_gradient(aggregation: str) -> None:
    """A second row that repeats the context and trains the other half of the sampled ids."""
    rows = some_rows()
    split = []
    for row in rows:
        half = row.loss_mask & (np.arange(len(row)) % 2 == 0)
        for mask in (half, row.loss_mask & ~half):
            if mask.any():
                split.append(replace(row, loss_mask=mask, advantages=np.where(mask, row.advantages, 0)))
    assert len(split) > len(rows)
    assert_equal(gradient(rows, aggregation=aggregation), gradient(split, aggregation=aggregation))


def test_the_gradients_of_ranks_with_the_denominators_of_the_step_add_up() -> None:
    model = copy.deepcopy(tiny_policy().model)
    learner = Learner(model, LearnerConfig(checkpoint_layers=False), 1, 1.0)
    method, rows = GRPO({}, 64), some_rows()
    for rank in range(4):
        learner.accumulate(rows[rank::4], method.loss, Needs(), count(rows, False))
    parts = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
    assert_equal(gradient(rows), parts)


def test_checkpointed_layers_give_the_same_gradient() -> None:
    assert_equal(gradient(some_rows()), gradient(some_rows(), checkpoint=True))


def test_groups_without_advantage_add_nothing_and_are_skipped() -> None:
    rows = some_rows()
    silent = [replace(r, advantages=np.zeros(len(r), np.float32)) if r.group_index else r for r in rows]
    assert_equal(gradient([r for r in rows if not r.group_index]), gradient(silent))
    halved = gradient(silent, count_zero_groups=True)
    tokens = [int(r.loss_mask.sum()) for r in rows]
    assert_equal(gradient(silent) * sum(tokens[:4]) / sum(tokens), halved)


@pytest.mark.parametrize("count_zero_groups", [False, True])
def test_means_are_over_the_tokens_that_were_computed(count_zero_groups: bool) -> None:
    """A silent group, and a silent member of a live one: nothing is computed for them, so they are in no mean."""
    rows = [replace(r, behavior_logprobs=r.behavior_logprobs * 0) for r in some_rows()]
    silent = [replace(r, advantages=r.advantages * 0) if r.group_index or r is rows[1] else r for r in rows]
    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(), 1, 1.0)
    loss = GRPO({"count_zero_groups": count_zero_groups}, 64).loss
    found = learner.update(silent, loss, Needs(), count_zero_groups)
    alone = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(), 1, 1.0)
    expected = alone.update([rows[0], *rows[2:4]], loss, Needs(), count_zero_groups)
    for name in ("ratio", "clipped", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_row_without_advantage_still_counts_among_the_tokens_of_its_trajectory() -> None:
    row = some_rows()[0]
    first = row.loss_mask & (np.arange(len(row)) < len(row) - 1)
    last = row.loss_mask & ~first
    whole = replace(row, advantages=np.where(first, row.advantages, 0))
    split = [replace(whole, loss_mask=mask, advantages=np.where(mask, whole.advantages, 0)) for mask in (first, last)]
    for aggregation in AGGREGATIONS:
        assert_equal(gradient([whole], aggregation=aggregation), gradient(split, aggregation=aggregation))


@pytest.mark.parametrize(
    ("option", "value"),
    [("clip_low", 0.9), ("clip_high", 5.0), ("entropy_coefficient", 0.1), ("aggregation", "sequence_mean")],
)
def test_every_option_changes_the_gradient(option: str, value: object) -> None:
    rows = some_rows()
    needs = Needs(entropy=option == "entropy_coefficient")
    change = gradient(rows) - gradient(rows, needs=needs, **{option: value})
    assert float(change.norm() / gradient(rows).norm()) > 1e-3


def test_kl_to_the_policy_itself_adds_no_gradient_and_to_another_does() -> None:
    rows = some_rows()
    same = gradient(rows, needs=Needs(reference=copy.deepcopy(tiny_policy().model)), kl_coefficient=0.5)
    assert_equal(gradient(rows), same)
    other = gradient(rows, needs=Needs(reference=copy.deepcopy(tiny_policy(1).model)), kl_coefficient=0.5)
    assert float((other - same).norm() / same.norm()) > 1e-2


def test_sinks_receive_gradient_in_every_layer() -> None:
    model = copy.deepcopy(tiny_policy().model)
    learner = Learner(model, LearnerConfig(), 1, 1.0)
    learner.update(some_rows(), GRPO({}, 64).loss, Needs(), False)
    for layer in model.model.layers:
        assert float(layer.self_attn.sinks.grad.abs().min()) > 0


def test_a_head_that_scales_its_logits_is_not_taken_for_a_plain_one() -> None:
    model = copy.deepcopy(tiny_policy().model)
    assert plain_head(model)
    scaled = copy.deepcopy(tiny_policy().model)
    scaled.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert not plain_head(scaled)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    model = copy.deepcopy(tiny_policy().model)
    rates = {}
    for schedule in ("constant", "linear", "cosine"):
        learner = Learner(model, LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule), 6, 1.0)
        rates[schedule] = []
        for learner.updates in range(7):
            rates[schedule].append(round(learner.learning_rate(), 3))
    assert rates["constant"] == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates["linear"] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates["cosine"] == [0.5, 1, 1, 0.854, 0.5, 0.146, 0]


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_change() -> None:
    model = copy.deepcopy(tiny_policy().model)
    learner = Learner(model, LearnerConfig(), 1, 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    rows = [replace(r, behavior_logprobs=r.behavior_logprobs - 200) for r in some_rows()]
    with pytest.raises((FloatingPointError, AssertionError), match="not finite"):
        learner.update(rows, GRPO({"clip_high": 1e30}, 64).loss, Needs(), False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
