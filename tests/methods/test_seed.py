"""SEED: the gated likelihood in float64, prompts with lessons and untouched actions, analyzers, small runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.learner.losses import LossInputs
from sinkflex.learner.rows import rows_of
from sinkflex.learner.scorer import Scorer
from sinkflex.methods.lessons import answer, by_rule, of_other_tasks, question, read
from sinkflex.methods.method import build_method
from sinkflex.methods.seed import SEED, SHARE, TAUGHT
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.train import train
from sinkflex.trajectory import Group, Outcome, Row, Trajectory, Turn
from tests.methods.episodes import episode, group, turn
from tests.methods.small_run import records, small
from tests.policy.tiny_policy import TOOLS, tiny_policy

N = 12
POLICY = tiny_policy()
CHAT = Chat(POLICY.tokenizer, "Be brief.", TOOLS)


def seed(**options: Any) -> SEED:
    method = build_method("seed", {"analyzer": "rule", "kl_coefficient": 0.0, "opd_weight": 1.0, **options}, 100)
    assert isinstance(method, SEED)
    return method


def gradient(method: SEED, policy: Tensor, taught: Tensor, share: Tensor) -> Tensor:
    """The gradient of the loss, without a reward, for the log-probs of N sampled tokens."""
    inputs = LossInputs(
        policy_logprobs=policy,
        behavior_logprobs=policy.detach(),
        advantages=torch.zeros(N, dtype=torch.float64),
        trajectory=torch.arange(N) // 4,
        trajectory_tokens=torch.full((N,), 4),
        tokens=N,
        trajectories=3,
        streams={TAUGHT: taught, SHARE: share},
    )
    return torch.autograd.grad(method.loss(inputs)[0], policy)[0]


def inputs(number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(number)
    policy = torch.tensor(-rng.exponential(1, N), requires_grad=True)
    has = torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0] * 4, dtype=torch.float64)
    return policy, torch.tensor(-rng.exponential(1, N)), has * N / has.sum()


def test_the_gradient_is_minus_the_gate_over_tokens_with_a_lesson() -> None:
    policy, taught, share = inputs()
    has = share > 0
    wanted = -torch.sigmoid(5 * (taught - policy.detach())) * has / has.sum()
    torch.testing.assert_close(gradient(seed(), policy, taught, share), wanted, rtol=0, atol=1e-15)
    assert (wanted[has] < 0).all(), "every token with a lesson is pushed up"


def test_a_flat_gate_is_half_the_likelihood_and_centered_it_is_nothing() -> None:
    policy, taught, share = inputs()
    has = (share > 0).double()
    nll = torch.autograd.grad(-(has * policy).sum() / has.sum(), policy)[0]
    torch.testing.assert_close(gradient(seed(beta=0.0), policy, taught, share), nll / 2, rtol=0, atol=1e-15)
    assert not gradient(seed(beta=0.0, center=True), policy, taught, share).any()


def test_centering_changes_noise_and_not_the_mean_gradient_on_policy() -> None:
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    taught = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    p, gate = logp.detach().exp(), torch.sigmoid(5 * (taught - logp.detach()))
    plain, centered = (
        torch.autograd.grad(-(p * g * logp).sum(), logits, retain_graph=True)[0] for g in (gate, gate - 0.5)
    )
    torch.testing.assert_close(plain, centered, rtol=0, atol=1e-15)
    scores = torch.eye(4, dtype=torch.float64) - p
    noise = [(p * ((g[:, None] * scores) ** 2).sum(1)).sum() for g in (gate, gate - 0.5)]
    assert noise[1] < noise[0]


def test_where_the_lesson_changes_nothing_the_gate_is_one_half() -> None:
    policy, _, share = inputs()
    torch.testing.assert_close(gradient(seed(), policy, policy.detach(), share), -share / N * 0.5)


@pytest.mark.peers
def test_it_is_trls_self_distillation_with_another_weight() -> None:
    trl = pytest.importorskip("trl.experimental.sdft.loss_utils", reason="pip install --no-deps trl==1.16.0")
    rng = torch.Generator().manual_seed(0)
    logits, taught = (torch.randn(1, N, 30, generator=rng, dtype=torch.float64) for _ in range(2))
    ids = torch.randint(0, 30, (1, N), generator=rng)
    logits.requires_grad_()
    values = trl.compute_sampled_token_self_distillation_loss(logits, taught, ids, distillation_alpha=1.0)[0]
    policy, with_lesson = (torch.log_softmax(x, -1)[0].gather(1, ids[0, :, None])[:, 0] for x in (logits, taught))
    gap = (with_lesson - policy).detach()
    weight = torch.sigmoid(5 * gap) / gap  # theirs weighs a token by the gap, ours by the gate
    (theirs,) = torch.autograd.grad((values * weight).mean(), logits, retain_graph=True)
    ours = gradient(seed(), policy, with_lesson.detach(), torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(policy, logits, ours)[0], theirs, rtol=0, atol=1e-12)


def play(names: Sequence[str], reward: float, member: int = 0, task_id: str = "t") -> Trajectory:
    return episode([turn(2, [ToolCall(n)], back=f"{n} {i}") for i, n in enumerate(names)], reward, member, task_id)


def test_the_rule_tells_what_solved_the_task_or_what_was_not_enough() -> None:
    assert by_rule(play(["check_network_status", "toggle_data"], 1.0)) == "This solves it: toggle_data."
    assert by_rule(play(["check_network_status"], 1.0)) == "This solves it: check_network_status."
    failed = play(["toggle_data", "toggle_data"], 0.0)
    failed.turns[1].observation = failed.turns[0].observation
    assert by_rule(failed) == "This is not enough: toggle_data. Do not repeat toggle_data."
    assert by_rule(play([], 0.0)) == "This is not enough: only looking."


def test_a_lesson_is_read_as_it_is_written_and_nothing_else_is() -> None:
    t = play(["toggle_data"], 1.0)
    assert read(f"Sure: {answer(t, by_rule(t))}") == by_rule(t)
    for bad in ("", "{}", "[1]", '{"episode_skill": 3}', '{"episode_skill": " "}', '{"episode_skill": "<|end|> x"}'):
        assert read(bad) == ""
    assert read(json.dumps({"episode_skill": "x" * 500})) == ""


CANARY = "CANARY-7731"


def test_answers_reach_no_analyzer() -> None:
    t = play(["toggle_data"], 0.0, task_id=f"[mms_issue]{CANARY}[PERSONA:None]")
    t.reward_parts, t.tags = {CANARY: 0.0}, {"gold": CANARY}
    assert CANARY not in by_rule(t) and not any(CANARY in message.content for message in question(t))


def test_shuffled_lessons_are_those_of_other_tasks() -> None:
    assert of_other_tasks(["a", "b", "c", "d"], ["1", "1", "2", "2"]) == ["c", "c", "a", "a"]
    assert of_other_tasks(["a", "b"], ["1", "1"]) == ["", ""]


def scorer() -> Scorer:
    sampler = Sampler(POLICY.model, [1], slots=2, max_tokens=400, max_turn_tokens=5)
    return Scorer({"policy": lambda: POLICY.model}, lambda folder: POLICY.model, CHAT, sampler, 1.0, 200)


def played() -> tuple[list[Group], list[Row]]:
    """Two episodes with real prompts, the second of which forks."""
    rng = np.random.default_rng(0)
    members = []
    for i in range(2):
        prompt = CHAT.start([Message("user", f"My line {i} is slow.")])
        turns = [
            Turn(prompt, rng.integers(7, 200, 4).tolist(), [0.0] * 4, 0, Action(tool_calls=(ToolCall("get_line"),)))
        ]
        later = rng.integers(7, 200, 3).tolist()
        again = Turn(
            [*prompt, *later] if i else later, rng.integers(7, 200, 3).tolist(), [0.0] * 3, 0, Action(text="x")
        )
        again.forks = bool(i)
        members.append(Trajectory("t", i, [*turns, again], Outcome.FAILED, StopReason.USER_STOP, 0.0, domain="telecom"))
    groups = [Group("t", members)]
    return groups, rows_of(groups, [[np.zeros(t.sampled_tokens, np.float32) for t in members]])


def test_lessons_stand_after_the_task_in_every_row_and_actions_are_the_same_ids() -> None:
    groups, batch = played()
    method, s = seed(), scorer()
    method.score(groups, batch, s)
    assert len(batch) == 3
    for row in batch:
        taught = method.edit(s)(row)
        text = str(CHAT.tokenizer.decode(taught.token_ids.tolist()))
        assert f"is slow. Advice: {method.lessons[row.trajectory_index]}<|end|>" in text
        assert taught.token_ids[taught.loss_mask].tobytes() == row.token_ids[row.loss_mask].tobytes()
        at = np.flatnonzero(taught.loss_mask)
        with torch.no_grad():
            logits = POLICY.model(input_ids=torch.from_numpy(taught.token_ids)[None], use_cache=False).logits[0]
        alone = torch.log_softmax(logits.float(), -1)[at - 1, taught.token_ids[at]].numpy()
        np.testing.assert_allclose(row.streams[TAUGHT][row.loss_mask], alone, atol=2e-5)
        assert not row.streams[TAUGHT][~row.loss_mask].any() and not row.streams[SHARE][~row.loss_mask].any()


def test_episodes_without_a_lesson_have_no_part_in_the_term() -> None:
    groups, batch = played()
    method, s = seed(analyzer="policy"), scorer()
    method.score(groups, batch, s)
    assert method.lessons == ["", ""], "a random policy writes no lesson"
    assert not any(row.streams[SHARE].any() for row in batch)


def test_a_cached_teacher_stays_and_a_live_one_follows_the_weights() -> None:
    groups, batch = played()
    for teacher in ("cached", "live"):
        method, s = seed(teacher=teacher), scorer()
        method.score(groups, batch, s)
        before = [row.streams[TAUGHT].copy() for row in batch]
        with torch.no_grad():
            POLICY.model.get_output_embeddings().weight.mul_(1.5)  # type: ignore[union-attr]
        method.rescore(batch, s)
        with torch.no_grad():
            POLICY.model.get_output_embeddings().weight.div_(1.5)  # type: ignore[union-attr]
        same = [np.array_equal(row.streams[TAUGHT], old) for row, old in zip(batch, before, strict=True)]
        assert all(same) if teacher == "cached" else not any(same)
        for row in batch:
            row.streams.clear()


def test_statistics_over_rows_weigh_long_episodes_more() -> None:
    episodes = group([[2], [2, 2, 2]], [1.0, 0.0])
    rows = np.array([1.0, 0.0, 0.0, 0.0])
    short, long = seed(statistics="row").advantages(episodes)
    assert short[0] == pytest.approx((1 - rows.mean()) / (rows.std(ddof=1) + 1e-6))
    assert long[0] == pytest.approx(-rows.mean() / (rows.std(ddof=1) + 1e-6))
    grpo = build_method("grpo", {}, 100)
    plain = seed(statistics="trajectory").advantages(episodes)
    assert all(np.array_equal(a, b) for a, b in zip(plain, grpo.advantages(episodes), strict=True))
    assert not any(a.any() for a in seed(statistics="row").advantages(group([[2], [3]], [1.0, 1.0])))


def test_without_the_term_a_run_is_grpo_to_the_bit(tmp_path: Path) -> None:
    moving = ("train.steps=1", "method.entropy_coefficient=0.01")  # so that there is a gradient without a reward
    off = ("method.opd_weight=0", "method.kl_coefficient=0", "method.dual_clip=0")
    train(small(tmp_path / "off", "seed", *off, *moving))
    train(small(tmp_path / "grpo", "grpo", *moving))
    for name in ("trajectories/step_1.jsonl.zst", "checkpoints/step_1/model/model.safetensors"):
        assert (tmp_path / "off" / name).read_bytes() == (tmp_path / "grpo" / name).read_bytes()


@pytest.mark.parametrize("analyzer", ["rule", "policy"])
def test_it_trains_and_says_who_wrote_the_lessons(analyzer: str, tmp_path: Path) -> None:
    options = (
        f'method.analyzer="{analyzer}"',
        'method.teacher="live"',
        "learner.mini_batches=2",
        'rollout.context="window(1)"',
    )
    train(small(tmp_path, "seed", *options))
    for step in records(tmp_path):
        written = step[f"seed/lessons_by/{analyzer}"]
        assert written == 1.0 if analyzer == "rule" else 0 <= written <= 1
        if analyzer == "rule":
            assert 0 < step["learner/gate"] < 1 and step["learner/gradient_norm"] > 0
