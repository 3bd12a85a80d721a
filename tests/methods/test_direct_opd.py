"""Direct-OPD: gradients against autograd in float64, the table of b, stages, and transfers on small models."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkflex.learner.losses import LossInputs
from sinkflex.learner.scorer import Scorer
from sinkflex.methods.direct_opd import CANDIDATES, OLD, START, WEIGHTED, DirectOPD
from sinkflex.methods.method import build_method
from sinkflex.methods.policy_shift import next_weight, weighted
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.recipe import ConfigError
from sinkflex.train import train
from sinkflex.trajectory import Row, read_trajectories
from tests.learner.test_scorer import rows
from tests.methods.episodes import group
from tests.methods.small_run import records, services, small
from tests.policy.tiny_policy import TOOLS, tiny_policy

PAIR = {"teachers": ["after"], "teacher_references": ["before"]}
N, V = 6, 40


def opd(**options: Any) -> DirectOPD:
    method = build_method("direct_opd", {**PAIR, "kl_coefficient": 0.0, **options}, 100)
    assert isinstance(method, DirectOPD)
    return method


def models(seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """Logits of a policy with gradient [N, V], and a shift over its vocabulary."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 2, (N, V)), requires_grad=True)
    return logits, rng.normal(0.3, 1, (N, V))


def gradient(method: DirectOPD, logits: Tensor, shift: np.ndarray, k: int, old: Tensor | None = None) -> Tensor:
    """The gradient of the loss for the policy's logits; every token is one the policy sampled."""
    logp = torch.log_softmax(logits, -1)
    old = logp.detach() if old is None else torch.log_softmax(old, -1)
    ids = old.topk(k).indices
    a = weighted(np.take_along_axis(shift, ids.numpy(), 1), old.gather(1, ids).numpy(), method.options.center)
    inputs = LossInputs(
        policy_logprobs=logp[:, 0],
        behavior_logprobs=old[:, 0],
        advantages=torch.zeros(N, dtype=torch.float64),
        trajectory=torch.zeros(N, dtype=torch.int64),
        trajectory_tokens=torch.full((N,), N),
        tokens=N,
        trajectories=1,
        candidate_logprobs=logp.gather(1, ids),
        streams={CANDIDATES: ids, OLD: old.gather(1, ids), WEIGHTED: torch.from_numpy(a)},
    )
    loss, _ = method.loss(inputs)
    return torch.autograd.grad(loss, logits)[0]


def test_over_the_whole_vocabulary_it_is_the_gradient_of_the_expected_shift() -> None:
    logits, shift = models()
    expected = (torch.softmax(logits, -1) * torch.from_numpy(shift)).sum() / N
    (exact,) = torch.autograd.grad(-expected, logits)
    torch.testing.assert_close(gradient(opd(), logits, shift, V), exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(opd(), logits, shift + 5, V), exact, rtol=0, atol=1e-12)


def test_under_the_cut_it_is_the_sum_of_the_formula() -> None:
    logits, shift = models()
    logp = torch.log_softmax(logits, -1)
    ids = logp.topk(5).indices
    w = torch.softmax(logp.detach().gather(1, ids), -1)
    surrogate = -(w * torch.from_numpy(shift).gather(1, ids) * logp.gather(1, ids)).sum() / N
    (by_hand,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(gradient(opd(), logits, shift, 5), by_hand, rtol=0, atol=1e-12)


def test_centering_makes_the_cut_exact_and_a_constant_harmless() -> None:
    logits, shift = models()
    ids = logits.topk(5).indices
    renormalized = torch.softmax(logits.gather(1, ids), -1)
    (exact,) = torch.autograd.grad(-(renormalized * torch.from_numpy(shift).gather(1, ids)).sum() / N, logits)
    centered, plain = opd(center=True), opd()
    torch.testing.assert_close(gradient(centered, logits, shift, 5), exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(centered, logits, shift + 3, 5), exact, rtol=0, atol=1e-12)
    leak = gradient(plain, logits, shift + 3, 5) - gradient(plain, logits, shift, 5)
    assert leak.abs().max() > 1e-3, "without it the constant leaks into the gradient"


def test_no_shift_gives_no_gradient_and_swapping_the_pair_turns_it_round() -> None:
    logits, shift = models()
    assert not gradient(opd(), logits, np.zeros_like(shift), 5).any()
    torch.testing.assert_close(gradient(opd(), logits, -shift, 5), -gradient(opd(), logits, shift, 5))


def test_what_the_teacher_gained_is_pushed_up() -> None:
    logits, shift = models()
    shift[:] = 0
    best = logits.argmax(1)
    shift[np.arange(N), best.numpy()] = 1.0
    step = -gradient(opd(), logits, shift, 5)
    assert (step.gather(1, best[:, None]) > 0).all()


def test_far_from_the_sampling_policy_the_ratio_is_clipped_for_each_id() -> None:
    logits, shift = models()
    old = logits.detach().clone()
    best = old.argmax(1)
    old[torch.arange(N), best] -= 3.0  # the policy holds it for much likelier than before
    shift[:] = 0
    shift[np.arange(N), best.numpy()] = 1.0
    assert not gradient(opd(), logits, shift, V, old).any()
    assert not gradient(opd(), logits, -shift, V, old).any(), "its cost is bounded at three times the advantage"
    assert gradient(opd(dual_clip=0.0), logits, -shift, V, old).any()


@pytest.mark.peers
def test_the_sampled_variant_is_trls_distillation_against_the_teachers_reference() -> None:
    trl = pytest.importorskip("trl.experimental.iw_opd", reason="pip install --no-deps trl==1.16.0")
    logits, shift = models()
    ids, labels = logits.detach()[:, :3].argmax(1)[None], torch.zeros(1, N, dtype=torch.int64)
    logp = torch.log_softmax(logits, -1)[torch.arange(N), ids[0]]
    before = torch.zeros(1, N, dtype=torch.float64)
    after = torch.from_numpy(shift)[torch.arange(N), ids[0]][None]
    model = SimpleNamespace(training=True)
    plain = SimpleNamespace(
        temperature=1.0, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, model=model, _metrics={"train": defaultdict(list)}
    )
    theirs = trl.IWOPDTrainer._compute_iw_opd_loss(plain, logits[None], ids, labels, after, before)
    (wanted,) = torch.autograd.grad(theirs, logits, retain_graph=True)
    inputs = LossInputs(
        policy_logprobs=logp,
        behavior_logprobs=logp.detach(),
        advantages=after[0],
        trajectory=torch.zeros(N, dtype=torch.int64),
        trajectory_tokens=torch.full((N,), N),
        tokens=N,
        trajectories=1,
    )
    (ours,) = torch.autograd.grad(opd(variant="sampled").loss(inputs)[0], logits)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("b", "reward", "wanted"),
    [
        (1.0, 0.3, 1.01),
        (1.0, -1e-9, 0.99),
        (1.0, 0.0, 1.0),
        (2.5, 0.3, 2.5),
        (2.49, 7.0, 2.5),
        (0.5, -0.3, 0.5),
        (0.501, -0.3, 0.5),
    ],
)
def test_b_brakes_where_the_policy_agrees_and_stays_within_its_limits(b: float, reward: float, wanted: float) -> None:
    assert next_weight(b, reward, 0.01, 0.5, 2.5) == pytest.approx(wanted)


def test_from_the_largest_b_to_the_least_it_takes_160_steps_and_without_a_step_it_stays() -> None:
    b, steps = 2.5, 0
    while b > 0.5:
        b, steps = next_weight(b, -1.0, 0.01, 0.5, 2.5), steps + 1
    assert steps == 161
    assert next_weight(9.0, -1.0, 0.0, 0.5, 2.5) == 9.0


def scorer(tmp: Path) -> Scorer:
    policy = tiny_policy()
    named = {"policy": 0, "reference": 1, "after": 2, "before": 3}
    makers = {name: (lambda seed=seed: tiny_policy(seed).model) for name, seed in named.items()}
    sampler = Sampler(policy.model, [1], slots=2, max_tokens=400, max_turn_tokens=5)
    return Scorer(makers, lambda folder: tiny_policy(9).model, Chat(policy.tokenizer, "", TOOLS), sampler, 1.0, 60)


def scored(method: DirectOPD, tmp: Path) -> list[Row]:
    batch = rows()
    method.score([], batch, scorer(tmp))
    return batch


def test_streams_hold_the_formula_and_nothing_outside_what_was_sampled(tmp_path: Path) -> None:
    s = scorer(tmp_path)
    for row in scored(opd(k=4), tmp_path):
        outside = ~row.loss_mask
        assert not any(row.streams[name][outside].any() for name in (CANDIDATES, OLD, WEIGHTED))
        after, before = (s.logprobs([row], name, candidates=CANDIDATES)[0] for name in ("after", "before"))
        w = np.exp(row.streams[OLD]) / np.exp(row.streams[OLD]).sum(1, keepdims=True)
        wanted = np.where(row.loss_mask[:, None], w * (after - before), 0)
        np.testing.assert_allclose(row.streams[WEIGHTED], wanted, atol=1e-5)
        assert not row.advantages.any()


def test_the_sampled_variant_puts_the_shift_of_each_drawn_id_on_its_advantage(tmp_path: Path) -> None:
    s, method = scorer(tmp_path), opd(variant="sampled")
    assert method.needs_candidates == ""
    for row in scored(method, tmp_path):
        after, before = (s.logprobs([row], name)[0] for name in ("after", "before"))
        np.testing.assert_allclose(row.advantages, after - before, atol=1e-5)
        assert not row.advantages[~row.loss_mask].any() and not row.streams


def test_limits_shuffles_and_the_start_of_the_kl(tmp_path: Path) -> None:
    plain = scored(opd(variant="sampled"), tmp_path)
    held = scored(opd(variant="sampled", shift_limit=0.1), tmp_path)
    mixed = scored(opd(variant="sampled", shuffle_shift=True), tmp_path)
    for a, b, c in zip(plain, held, mixed, strict=True):
        np.testing.assert_allclose(b.advantages, a.advantages.clip(-0.1, 0.1))
        inside = a.loss_mask
        np.testing.assert_allclose(np.sort(c.advantages[inside]), np.sort(a.advantages[inside]))
    assert any(not np.array_equal(a.advantages, c.advantages) for a, c in zip(plain, mixed, strict=True))
    with_kl = scored(opd(kl_coefficient=1.0), tmp_path)
    start = scorer(tmp_path).logprobs(with_kl, "reference")
    assert all(np.allclose(row.streams[START], found) for row, found in zip(with_kl, start, strict=True))


def test_stages_follow_each_other_with_a_new_start_and_b_anew(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "warm_start")
    method = opd(
        teachers=["after", "before"], teacher_references=["before", "after"], stage_steps=2, kl_coefficient=2.0
    )
    s, stages, weights = scorer(tmp_path), [], []
    for step in range(1, 5):
        method.score([], rows(), s)
        stages.append(method.stage)
        weights.append(method.kl_weight)
        method.after_step([], {}, services(s, step, tmp_path))
        if step == 2:
            other = opd(teachers=["a", "b"], teacher_references=["c", "d"], stage_steps=2, kl_coefficient=2.0)
            other.load_state_dict(json.loads(json.dumps(method.state_dict())))
            assert (other.stage, other.start, other.kl_weight) == (1, str(tmp_path / "stage_1"), 2.0)
    assert stages == [0, 0, 1, 1]
    assert weights[0] == weights[2] == 2.0 and weights[1] != 2.0
    assert (tmp_path / "stage_1" / "model.safetensors").is_file()


def test_without_a_reward_advantages_are_zero_and_its_weight_scales_grpos() -> None:
    episodes = group([[2], [3]], [1.0, 0.0])
    plain = build_method("grpo", {}, 100).advantages(episodes)
    assert not any(a.any() for a in opd().advantages(episodes))
    for half, whole in zip(opd(outcome_weight=0.5).advantages(episodes), plain, strict=True):
        np.testing.assert_array_equal(half, whole / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": ["a"], "teacher_references": []}, "each model after RL"),
        ({"teachers": ["a", "b"], "teacher_references": ["c", "d"]}, "stage_steps"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opd(**options)


def test_without_a_pair_and_a_reward_there_is_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is learned"):
        scored(opd(teachers=[], teacher_references=[]), tmp_path)


def test_without_a_pair_a_run_is_grpo_to_the_bit(tmp_path: Path) -> None:
    moving = ("train.steps=1", "method.entropy_coefficient=0.01")  # so that there is a gradient without a reward
    off = ("method.outcome_weight=1", "method.kl_coefficient=0", "method.dual_clip=0")
    train(small(tmp_path / "off", "direct_opd", *off, *moving))
    train(small(tmp_path / "grpo", "grpo", *moving))
    for name in ("trajectories/step_1.jsonl.zst", "checkpoints/step_1/model/model.safetensors"):
        assert (tmp_path / "off" / name).read_bytes() == (tmp_path / "grpo" / name).read_bytes()


def test_a_pair_of_weak_models_moves_a_stronger_student_without_a_reward(tmp_path: Path) -> None:
    weak = ("model.tiny.layers=1", "train.steps=1", "method.entropy_coefficient=1", "learner.learning_rate=1e-2")
    train(small(tmp_path / "weak", "grpo", *weak))
    pair = [
        f'method.teachers=["{tmp_path}/weak/checkpoints/step_1/model"]',
        f'method.teacher_references=["{tmp_path}/weak/warm_start"]',
    ]
    train(small(tmp_path / "strong", "direct_opd", "model.tiny.layers=3", *pair))
    first, second = records(tmp_path / "strong")
    assert first["direct_opd/shift_largest"] > 0 and 0 < first["direct_opd/mass"] <= 1 + 1e-6
    assert first["learner/gradient_norm"] > 0
    assert second["direct_opd/kl_coefficient"] in (2.5, 2.5 * 0.99)
    assert read_trajectories(tmp_path / "strong" / "trajectories" / "step_2.jsonl.zst")


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "other")
    pair = [f'method.teachers=["{tmp_path}/other"]', f'method.teacher_references=["{tmp_path}/other"]']
    with pytest.raises(ValueError, match="vocabulary"):
        train(small(tmp_path / "run", "direct_opd", *pair))
