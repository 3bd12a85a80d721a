"""`sinkflex check` passes on the smoke recipe, and notices each fault that is planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from typer.testing import CliRunner

import sinkflex.learner.rows as row_module
from sinkflex.attention import huggingface
from sinkflex.check import CHECKS, line
from sinkflex.checks import attention, credit, gradients, tokens
from sinkflex.checks.subject import Broken, Subject, open_subject
from sinkflex.cli import app
from sinkflex.demonstrations import corpus
from sinkflex.learner import losses, packing
from sinkflex.learner.losses import LossInputs
from sinkflex.learner.step import Learner
from sinkflex.methods.method import Method
from sinkflex.policy.chat import Chat
from sinkflex.policy.model import new_policy
from sinkflex.policy.sampler import Sampler
from sinkflex.recipe import load_config
from sinkflex.rollout.episode import Episode
from sinkflex.trajectory import Group, Row
from tests.methods.small_run import small

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
SETTINGS = ("run.threads=1", "warmup.demonstrations=1", "warmup.repeats=1")
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    opened = open_subject(load_config(SMOKE, SETTINGS), tmp_path_factory.mktemp("check"))
    with opened.run:
        yield opened


@pytest.fixture
def fresh(subject: Subject) -> Subject:
    """The same run with nothing computed yet."""
    return Subject(subject.run, subject.groups)


def test_the_command_passes_on_the_smoke_recipe_and_prints_json() -> None:
    overrides = [part for setting in SETTINGS for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["check", str(SMOKE), "--json", *overrides])
    records = json.loads(result.stdout)
    assert [record["check"] for record in records] == list(CHECKS)
    assert [record for record in records if record["result"] != "PASS"] == []
    assert result.exit_code == 0


def test_a_failure_says_what_to_do_and_fails_the_command(monkeypatch: Patch) -> None:
    def fails(_: Subject) -> str:
        raise Broken("it is broken", "Mend it.")

    def crashes(_: Subject) -> str:
        raise KeyError("x")

    monkeypatch.setattr("sinkflex.check.CHECKS", {"one": fails, "two": crashes})
    monkeypatch.setattr("sinkflex.check.open_subject", lambda config, folder: open_nothing())
    result = CliRunner().invoke(app, ["check", str(SMOKE)])
    assert result.exit_code == 1
    assert "FAIL  one  it is broken\n      Mend it." in result.stdout
    assert "FAIL  two  KeyError: 'x'" in result.stdout and "2 of 2 checks fail" in result.stdout
    assert line({"result": "PASS", "check": "one", "found": "3 rows", "remedy": ""}) == "PASS  one  3 rows"


def open_nothing() -> Any:
    return SimpleNamespace(run=nullcontext())


# A planted fault: what it is, the check that must notice, and how it is planted.
FAULTS: dict[str, tuple[Callable[[Subject], str], Callable[[Patch, Subject], None]]] = {}


def fault(check: Callable[[Subject], str]) -> Callable[[Callable[[Patch, Subject], None]], Callable]:
    def register(plant: Callable[[Patch, Subject], None]) -> Callable:
        FAULTS[plant.__name__.replace("_", " ")] = (check, plant)
        return plant

    return register


def wrapped(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that changes its result."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original(*args, **kwargs), *args))


@fault(tokens.template)
def the_template_loses_a_newline(patch: Patch, subject: Subject) -> None:
    wrapped(patch, Chat, "extend", lambda result, *_: (result[0][1:], result[1]))


@fault(tokens.mask)
def the_mask_is_shifted_by_one(patch: Patch, subject: Subject) -> None:
    wrapped(patch, row_module, "_row", lambda row, *_: replace(row, loss_mask=np.roll(row.loss_mask, 1)))


@fault(tokens.mask)
def tool_results_are_trained(patch: Patch, subject: Subject) -> None:
    wrapped(patch, row_module, "_row", lambda row, *_: replace(row, loss_mask=np.arange(len(row)) > 9))


@fault(tokens.mask)
def only_the_first_row_of_an_episode_gets_its_advantage(patch: Patch, subject: Subject) -> None:
    wrapped(
        patch, row_module, "_row", lambda row, turns, first, *_: replace(row, advantages=row.advantages * (first == 0))
    )


@fault(tokens.logprobs)
def the_learner_ignores_the_temperature(patch: Patch, subject: Subject) -> None:
    original = tokens.row_logprobs
    patch.setattr(tokens, "row_logprobs", lambda model, rows, temperature, budget: original(model, rows, 1.0, budget))


@fault(tokens.logprobs)
def the_learner_has_another_temperature_than_the_sampler(patch: Patch, subject: Subject) -> None:
    patch.setattr(subject.run.learner, "temperature", 0.9)


@fault(tokens.logprobs)
def the_sampler_keeps_only_likely_tokens(patch: Patch, subject: Subject) -> None:
    """Top-p: probabilities are those among the kept ones."""
    original = Sampler._sample

    def nucleus(self: Sampler, streams: list, logits: torch.Tensor) -> list:
        likely = logits.softmax(-1)
        return original(self, streams, logits.masked_fill(likely < likely.median(-1, keepdim=True).values, -1e9))

    patch.setattr(Sampler, "_sample", nucleus)


def attention_that(patch: Patch, **changes: Any) -> None:
    known = AttentionInterface()._global_mapping
    patch.setitem(known, huggingface.NAME, lambda *a, **k: huggingface.plan_attention(*a, **{**k, **changes}))


@fault(attention.sinks)
def the_attention_drops_the_sinks(patch: Patch, subject: Subject) -> None:
    far = torch.full((subject.run.policy.model.config.num_attention_heads,), -1e30)
    attention_that(patch, s_aux=far)


@fault(attention.sinks)
def the_sinks_of_one_layer_are_frozen(patch: Patch, subject: Subject) -> None:
    patch.setattr(subject.run.policy.model.model.layers[1].self_attn.sinks, "requires_grad", False)


@fault(attention.window)
def the_window_is_one_too_wide(patch: Patch, subject: Subject) -> None:
    original = huggingface.plan_attention

    def wide(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        return original(*args, sliding_window=sliding_window and sliding_window + 1, **kwargs)

    patch.setitem(AttentionInterface()._global_mapping, huggingface.NAME, wide)


@fault(attention.packing)
def packed_rows_see_each_other(patch: Patch, subject: Subject) -> None:
    wrapped(patch, packing, "forest", lambda batch, *_: replace(batch, subtree_end=np.full(len(batch), len(batch))))
    patch.setattr("sinkflex.learner.logprobs.forest", packing.forest)


@fault(attention.padding)
def padding_is_seen(patch: Patch, subject: Subject) -> None:
    patch.setattr(huggingface.Plan, "padded", lambda real: huggingface.Plan.from_lengths([real.shape[1]] * len(real)))


@fault(gradients.micro_batches)
def the_loss_is_a_mean_over_its_micro_batch(patch: Patch, subject: Subject) -> None:
    patch.setattr(
        "sinkflex.methods.method.aggregate", lambda values, inputs, mode, constant=1, every_group=False: values.mean()
    )


@fault(gradients.ranks)
def every_rank_divides_by_its_own_tokens(patch: Patch, subject: Subject) -> None:
    original = Learner.accumulate

    def alone(self: Learner, rows: list[Row], loss: Any, needs: Any, counts: Any) -> Any:
        own = sum(int(row.loss_mask.sum()) for row in rows)
        return original(self, rows, loss, needs, counts._replace(tokens=own))

    patch.setattr(Learner, "accumulate", alone)


@fault(gradients.order)
def the_loss_favors_the_first_rows(patch: Patch, subject: Subject) -> None:
    def fading(inputs: LossInputs, *_: Any) -> LossInputs:
        return replace(inputs, advantages=inputs.advantages * torch.linspace(1, 0, len(inputs.advantages)))

    patch.setattr("sinkflex.learner.step.micro_batches", lambda rows, budget, parts=1: [list(rows)])
    wrapped(patch, Learner, "loss_inputs", fading)


@fault(gradients.resplit)
def a_row_is_taken_for_an_episode(patch: Patch, subject: Subject) -> None:
    def per_row(self: Learner, model: Any, batch: Any, needs: Any, counts: Any) -> LossInputs:
        inputs = original(self, model, batch, needs, counts)
        lengths = [row.loss_mask.sum() for row in batch.rows]
        inputs.advantages *= torch.tensor(np.repeat(1 / np.array(lengths), lengths), dtype=torch.float32)
        return inputs

    original = Learner.loss_inputs
    patch.setattr(Learner, "loss_inputs", per_row)


@fault(credit.silent_groups)
def a_group_of_one_is_paid_its_reward(patch: Patch, subject: Subject) -> None:
    def raw(self: Method, group: Group) -> list[np.ndarray]:
        if len(group.valid) > 1:
            return original(self, group)
        return [np.full(t.sampled_tokens, t.reward, np.float32) for t in group.valid]

    original = Method.advantages
    patch.setattr(Method, "advantages", raw)


@fault(credit.broken_episodes)
def a_broken_episode_is_in_the_baseline(patch: Patch, subject: Subject) -> None:
    def of_all(self: Method, group: Group) -> list[np.ndarray]:
        mean = np.mean([t.reward or 0.0 for t in group.members])
        return [np.full(t.sampled_tokens, t.reward - mean, np.float32) for t in group.valid]  # type: ignore[operator]

    patch.setattr(Method, "advantages", of_all)


@fault(credit.broken_episodes)
def a_fault_counts_as_reward_zero(patch: Patch, subject: Subject) -> None:
    original = Episode._finish
    patch.setattr(
        Episode, "_finish", lambda self, reason, reward, *rest, **k: original(self, reason, reward or 0.0, *rest, **k)
    )


@fault(credit.engine_noise)
def log_ratios_are_summed_over_an_episode(patch: Patch, subject: Subject) -> None:
    method = type(subject.run.method)({"correction": "trajectory_mask", "correction_high": 3.0}, 640)
    patch.setattr(subject.run, "method", method)
    original = losses.trajectory_mean
    patch.setattr(losses, "trajectory_mean", lambda values, inputs: original(values * inputs.trajectory_tokens, inputs))


@fault(gradients.resume)
def the_optimizer_is_not_restored(patch: Patch, subject: Subject) -> None:
    patch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, fresh: Subject, monkeypatch: Patch) -> None:
    check, plant = FAULTS[name]
    plant(monkeypatch, fresh)
    with pytest.raises((Broken, ValueError)) as caught:
        check(fresh)
    if isinstance(caught.value, Broken):
        assert caught.value.found and caught.value.remedy.endswith(".")


def test_every_check_has_a_planted_fault() -> None:
    assert {check for check, _ in FAULTS.values()} == set(CHECKS.values())


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of one vocabulary."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed in (1, 2):
        config = small(folder, "grpo", f"run.seed={seed}")
        new_policy(config, lambda config=config: corpus(config)).save(folder / str(seed))
    return [f'method.{name}=["{folder / seed}"]' for name, seed in (("teachers", "1"), ("teacher_references", "2"))]


@pytest.mark.parametrize(("method", "stream"), [("direct_opd", "candidates"), ("seed", "lesson_share")])
def test_rows_are_scored_as_the_method_scores_them(
    method: str, stream: str, teachers: list[str], tmp_path: Path
) -> None:
    options = teachers if method == "direct_opd" else ["method.analyzer=rule"]
    subject = open_subject(small(tmp_path, method, *options), tmp_path)
    with subject.run:
        assert all(len(row.streams[stream]) == len(row) for row in subject.rows)
        for prove in (gradients.micro_batches, gradients.order, gradients.resplit):
            prove(subject)
