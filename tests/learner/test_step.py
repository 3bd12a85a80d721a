"""The gradient of a step does not depend on how its rows are padded, packed, ordered or cut."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sinkflex.config import LearnerConfig
from sinkflex.learner.logprobs import plain_head
from sinkflex.learner.losses import LossInputs, clipped_surrogate
from sinkflex.learner.step import PROXIMAL, Learner, Needs, alias
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
    rows: Sequence[Row],
    budget: int = 10_000,
    needs: Needs | None = None,
    checkpoint: bool = False,
    cores: int = 1,
    **options: object,
) -> torch.Tensor:
    """Return the gradient of one update as one vector; the weights are thrown away."""
    model = copy.deepcopy(tiny_policy().model)
    config = LearnerConfig(micro_batch_tokens=budget, clip_norm=1e9, checkpoint_layers=checkpoint)
    learner = Learner(model, config, 1, 1.0, cores)
    method = GRPO({"kl_coefficient": 0.0, **options}, 64)
    learner.update(rows, method.loss, needs or Needs(), method.options.count_zero_groups)
    return torch.cat([torch.empty(0), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)]).double()


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


@pytest.mark.parametrize("budget", [1, 40, 90])
def test_the_gradient_does_not_depend_on_the_micro_batch(budget: int) -> None:
    rows = some_rows()
    assert_equal(gradient(rows), gradient(rows, budget))


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


CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "aggregation": ("sequence_mean", {}),
    "surrogate": ("cispo", {}),
    "clip_low": (0.9, {}),
    "clip_high": (5.0, {}),
    "dual_clip": (1.1, {}),
    "correction": ("token_truncate", {}),
    "correction_low": (0.9, {"correction": "token_mask"}),
    "correction_high": (1.1, {"correction": "token_mask"}),
    "kl_coefficient": (0.5, {}),
    "kl_estimator": ("k2", {"kl_coefficient": 0.5}),
    "entropy_coefficient": (0.1, {}),
    "count_zero_groups": (True, {}),
}
# These work on rewards, before there are rows; tests/methods/test_grpo.py has them.
OF_ADVANTAGES = {"baseline", "advantage_scale", "shuffle_advantages"}


def test_every_option_of_the_loss_changes_the_gradient() -> None:
    rows = some_rows(12)
    rng = np.random.default_rng(0)
    for row in rows:
        row.streams[PROXIMAL] = (row.behavior_logprobs + rng.normal(0, 0.4, len(row))).astype(np.float32)
    rows = [replace(r, advantages=np.zeros(len(r), np.float32)) if r.group_index == 2 else r for r in rows]

    def of(**options: Any) -> torch.Tensor:
        reference = tiny_policy(1).model if "kl_coefficient" in options else None
        needs = Needs("entropy_coefficient" in options, reference, "correction" in options)
        return gradient(rows, needs=needs, **options)

    for option, (value, setting) in CHANGES.items():
        before, after = of(**setting), of(**{**setting, option: value})
        assert float((after - before).norm() / before.norm()) > 1e-3, option
    assert set(CHANGES) | OF_ADVANTAGES == set(GRPO.Options.model_fields)


def test_an_option_that_is_accepted_and_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sinkflex.methods.method.clipped_surrogate",
        lambda inputs, low, high, dual: clipped_surrogate(inputs, low, high),
    )
    with pytest.raises(AssertionError, match="dual_clip"):
        test_every_option_of_the_loss_changes_the_gradient()


def test_kl_to_the_policy_itself_adds_no_gradient_and_to_another_does() -> None:
    rows = some_rows()
    same = gradient(rows, needs=Needs(reference=copy.deepcopy(tiny_policy().model)), kl_coefficient=0.5)
    assert_equal(gradient(rows), same)
    other = gradient(rows, needs=Needs(reference=copy.deepcopy(tiny_policy(1).model)), kl_coefficient=0.5)
    assert float((other - same).norm() / same.norm()) > 1e-2


def test_groups_without_advantage_keep_their_kl() -> None:
    """Their KL is divided by the tokens of all groups, whatever counts for the surrogate."""
    rows = some_rows()
    silent = [replace(r, advantages=np.zeros(len(r), np.float32)) for r in rows]
    reference = copy.deepcopy(tiny_policy(1).model)
    found = {
        counted: gradient(silent, needs=Needs(reference=reference), kl_coefficient=0.5, count_zero_groups=counted)
        for counted in (False, True)
    }
    assert_equal(found[True], found[False])
    half = [r if r.group_index else s for r, s in zip(rows, silent, strict=True)]
    with_kl = gradient(half, needs=Needs(reference=reference), kl_coefficient=0.5)
    ratio_1 = [replace(r, behavior_logprobs=r.behavior_logprobs) for r in half]
    assert_equal(with_kl, gradient(ratio_1) + found[False])


def test_streams_reach_the_loss_token_by_token_through_packing() -> None:
    rows = some_rows()
    for row in rows:
        ids = row.token_ids.astype(np.float32)
        row.streams |= {"ids": ids, "near": np.stack([ids + 1, row.advantages], 1)}
    seen: list[torch.Tensor] = []

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, near = inputs.streams["ids"], inputs.streams["near"]
        assert torch.equal(near, torch.stack([ids + 1, inputs.advantages], 1))
        seen.append(ids)
        return inputs.policy_logprobs.sum() * 0, {}

    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(micro_batch_tokens=60), 1, 1.0)
    learner.update(rows, loss, Needs(), False)
    expected = [i for row in rows for i in row.token_ids[row.loss_mask].tolist()]
    assert len(seen) > 1 and sorted(torch.cat(seen).tolist()) == sorted(expected)


def test_a_stream_alone_makes_a_row_count_and_be_computed() -> None:
    rows = [replace(r, advantages=np.zeros(len(r), np.float32)) for r in some_rows()]
    quiet = gradient(rows)
    assert len(quiet) == 0
    for row in rows:
        row.streams["teacher"] = np.where(row.loss_mask, 1, 0)
    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(), 1, 1.0)
    found = learner.update(rows, lambda inputs: (-inputs.policy_logprobs.sum(), {}), Needs(), False)
    assert found["gradient_norm"] > 0 and found["tokens"] == sum(int(r.loss_mask.sum()) for r in rows)


def test_candidates_are_scored_with_gradient_also_where_rows_share_a_node_but_not_the_candidates() -> None:
    rows = some_rows()[:2]
    rows[1] = replace(rows[0], trajectory_index=1)  # the same tokens
    rng = np.random.default_rng(0)
    for row in rows:
        row.streams["near"] = rng.integers(0, 300, (len(row), 3))
        row.streams["near"][:, 0] = row.token_ids

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert inputs.candidate_logprobs is not None
        torch.testing.assert_close(inputs.candidate_logprobs[:, 0], inputs.policy_logprobs)
        return inputs.candidate_logprobs[:, 1:].sum(), {}

    model = copy.deepcopy(tiny_policy().model)
    Learner(model, LearnerConfig(clip_norm=1e9), 1, 1.0).update(rows, loss, Needs(candidates="near"), False)
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    plain = copy.deepcopy(tiny_policy().model)
    logprobs = plain(torch.tensor(rows[0].token_ids)[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    for row in rows:
        mask = row.loss_mask[1:]
        logprobs[mask].gather(1, torch.tensor(row.streams["near"][1:][mask][:, 1:])).sum().backward(retain_graph=True)
    assert_equal(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]), found, 1e-5)


def test_proximal_logprobs_are_those_of_the_weights_before_the_first_update() -> None:
    rows, model = some_rows(), copy.deepcopy(tiny_policy().model)
    learner = Learner(model, LearnerConfig(learning_rate=1e-2), 2, 0.7)
    learner.recompute(rows)
    seen: list[float] = []

    def loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert inputs.proximal_logprobs is not None and not inputs.proximal_logprobs.requires_grad
        seen.append(float(inputs.log_ratio.abs().max().detach()))
        return -(inputs.advantages * inputs.policy_logprobs).mean(), {}

    for _ in range(2):
        learner.update(rows, loss, Needs(proximal=True), False)
    assert seen[0] < 1e-4 < 1e-2 < seen[1]
    alone = some_rows()
    learner.update(alone, loss, Needs(proximal=True), False)
    assert seen[2] == 0, "the only update of a batch needs no second pass"


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


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cores", [2, 3, 50])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_the_gradient_does_not_depend_on_how_many_cores_share_it(aggregation: str, cores: int, budget: int) -> None:
    needs = Needs(entropy=True, reference=tiny_policy().model)
    options: dict[str, Any] = {"aggregation": aggregation, "entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    alone = gradient(some_rows(), needs=needs, **options)
    shared = gradient(some_rows(), budget, needs, cores=cores, **options)
    assert (shared - alone).norm() <= 1e-6 * alone.norm()


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_updates_on_several_cores_repeat_to_the_bit_and_differ_from_one_core_by_rounding(
    checkpoint_layers: bool,
) -> None:
    rows, method, said, weights = some_rows(), GRPO({}, 64), [], []
    for cores in (1, 2, 2, 2):
        model = copy.deepcopy(tiny_policy().model)
        options = LearnerConfig(micro_batch_tokens=60, checkpoint_layers=checkpoint_layers)
        learner = Learner(model, options, 3, 1.0, cores)
        said.append([learner.update(rows, method.loss, Needs(), False) for _ in range(3)])
        weights.append(torch.cat([x.detach().flatten() for x in model.parameters()]))
    for one, two in zip(said[0], said[1], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert said[1] == said[2] == said[3]
    assert torch.equal(weights[1], weights[2]) and torch.equal(weights[1], weights[3])
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


def test_what_a_loss_counts_is_kept_on_several_cores_and_its_error_is_its_own() -> None:
    method, seen = GRPO({}, 64), []

    def counting(inputs: LossInputs) -> Any:
        seen.append(len(inputs.policy_logprobs))
        return method.loss(inputs)

    def failing(inputs: LossInputs) -> Any:
        raise ZeroDivisionError("of the method")

    learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(micro_batch_tokens=60), 1, 1.0, 2)
    threads = torch.get_num_threads()
    learner.update(some_rows(), counting, Needs(), False)
    assert len(seen) > 1 and sum(seen) == sum(int(row.loss_mask.sum()) for row in some_rows())
    with pytest.raises(ZeroDivisionError, match="of the method"):
        learner.update(some_rows(), failing, Needs(), False)
    assert torch.get_num_threads() == threads and threading.active_count() == 1


@pytest.mark.parametrize("tied", [False, True])
def test_an_alias_has_the_weights_of_its_model_and_gradients_of_its_own(tied: bool) -> None:
    model = copy.deepcopy(tiny_policy().model)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    other = alias(model)
    ids = torch.arange(2, 9)[None]
    other(input_ids=ids).logits.sum().backward()
    assert all(x.grad is None for x in model.parameters()) and any(x.grad is not None for x in other.parameters())
    assert len(list(other.parameters())) == len(list(model.parameters()))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
