"""EMPO: the published code's numbers, the paper's formulas by brute force, rollouts along an expert's trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinkflex.envs.env import Action, StopReason, ToolCall
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.methods.empo import EMPO, SCORES, returns
from sinkflex.methods.method import build_method
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampled, Stream
from sinkflex.rollout.episode import Episode
from sinkflex.tasks.gold import expert_calls
from sinkflex.tasks.semi_online import agreement, semi_online_score
from sinkflex.trajectory import Group, Outcome, Trajectory
from tests.methods.episodes import group
from tests.policy.tiny_policy import tiny_policy

# Ragged inputs drawn at random, with what the functions published with UI-S1 return for them (float32).
PUBLISHED = [json.loads(line) for line in Path(__file__).with_name("empo_published.jsonl").read_text().splitlines()]
TASK = "[mms_issue]bad_network_preference|user_abroad_roaming_disabled_off[PERSONA:None]"
WRONG = Action(tool_calls=(ToolCall("check_vpn_status"),))
HALF = Action(tool_calls=(ToolCall("get_data_usage", {"customer_id": "x", "line_id": "y"}),))


def empo(**options: Any) -> EMPO:
    method = build_method("empo", options, 100)
    assert isinstance(method, EMPO)
    return method


@pytest.mark.parametrize("case", PUBLISHED, ids=range(len(PUBLISHED)))
def test_code_mode_is_the_published_code(case: dict[str, list[list[float]]]) -> None:
    scores = [np.array(row) for row in case["scores"]]
    matched = [row == 1.0 for row in scores]
    for r, hit, wanted in zip(scores, matched, case["returns"], strict=True):
        np.testing.assert_allclose(returns(r, hit, 0.5, code=True), wanted, atol=1e-6)
    got = empo(mode="code", least_deviation=0.0).credit(scores, matched)
    for a, wanted in zip(got, case["advantages"], strict=True):
        np.testing.assert_allclose(a, wanted, rtol=1e-6, atol=1e-6)


def paper_by_brute_force(scores: Sequence[Sequence[float]], gamma: float, omega: float) -> list[list[float]]:
    values: list[list[float]] = []
    for row in scores:
        of_row = []
        for t in range(len(row)):
            end = t
            while row[end] == 1.0 and end + 1 < len(row):
                end += 1
            of_row.append(sum(gamma ** (k - t) * row[k] for k in range(t, end + 1)))
        values.append(of_row)

    def scaled(x: float, among: list[float]) -> float:
        return float((x - np.mean(among)) / (np.std(among, ddof=1) + 1e-6)) if len(set(among)) > 1 else 0.0

    totals = [sum(row) for row in scores]
    return [
        [
            scaled(totals[i], totals) + omega * scaled(value, [v[t] for v in values if len(v) > t])
            for t, value in enumerate(of_row)
        ]
        for i, of_row in enumerate(values)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_paper_mode_equals_the_formulas(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = [rng.choice(SCORES["paper"], rng.integers(1, 8)) for _ in range(rng.integers(1, 7))]
    got = empo(least_deviation=0.0, gamma=0.5, step_weight=0.7).credit(scores, [r == 1.0 for r in scores])
    for a, wanted in zip(got, paper_by_brute_force([r.tolist() for r in scores], 0.5, 0.7), strict=True):
        np.testing.assert_allclose(a, wanted, atol=1e-6)


def test_returns_by_hand_end_with_a_miss_in_the_paper_and_before_it_in_the_code() -> None:
    r, hit = np.array([1.0, 1.0, 0.5, 1.0]), np.array([True, True, False, True])
    assert returns(r, hit, 0.5, code=False).tolist() == [1 + 0.5 * (1 + 0.5 * 0.5), 1 + 0.25, 0.5, 1.0]
    assert returns(r, hit, 0.5, code=True).tolist() == [1.5, 1.0, 0.5, 1.0]


@pytest.mark.parametrize("mode", ["paper", "code"])
def test_a_group_that_deviates_too_little_teaches_nothing(mode: str) -> None:
    scores = [np.array([0.5, 0.5]), np.array([0.5, 0.55])]
    hit = [np.zeros(2, bool)] * 2
    assert not any(a.any() for a in empo(mode=mode, least_deviation=100.0).credit(scores, hit))
    assert empo(mode="code", least_deviation=100.0).credit([np.array([0.55])], [np.array([False])])[0].any(), (
        "one sibling alone is kept"
    )


def test_one_turn_by_the_episode_part_alone_is_grpo_to_the_bit() -> None:
    rewards = [1.0, 0.5, 0.1, 1.0]
    plain = [float(a[0]) for a in build_method("grpo", {}, 100).advantages(group([[1]] * 4, rewards))]
    off = empo(step_weight=0.0, least_deviation=0.0).credit([np.array([r]) for r in rewards], [np.zeros(1, bool)] * 4)
    assert [float(np.float32(a[0])) for a in off] == plain


def drive(method: EMPO, policy: Sequence[Action | None], phase: str = "train") -> Trajectory:
    """Let a policy made of actions act; None stands for the expert's next call."""
    env = Tau2Env("telecom", solo=True, policy_text="none")
    chat = Chat(tiny_policy().tokenizer, env.policy, env.tools)
    expert = [Action(tool_calls=(call,)) for call in expert_calls("telecom", TASK)]
    run = Episode(env, chat, TASK, 0, 0, 100_000, 0, method, phase)
    run.begin()
    for k, action in enumerate(policy):
        ids = chat.action_ids(action or expert[k])
        stream = Stream(-1, np.random.default_rng(0), [])
        if run.advance(Sampled(stream, ids, [0.0] * len(ids), "stop")) is None:
            break
    assert run.trajectory is not None
    return run.trajectory


LENGTH = len(expert_calls("telecom", TASK))


@pytest.mark.parametrize("patches", [0, 1, 2, 50])
def test_a_policy_that_is_always_right_needs_no_patch(patches: int) -> None:
    t = drive(empo(patches=patches), [None] * LENGTH)
    assert (len(t.turns), t.outcome, t.reward) == (LENGTH, Outcome.SOLVED, 1.0)
    assert empo().levels(t).tolist() == [3] * LENGTH


@pytest.mark.parametrize(("patches", "turns"), [(0, 1), (1, 2), (2, 3), (50, LENGTH)])
def test_a_policy_that_is_always_wrong_goes_as_far_as_its_patches(patches: int, turns: int) -> None:
    t = drive(empo(patches=patches), [WRONG] * LENGTH)
    assert len(t.turns) == turns
    assert sum(turn.executed is not None for turn in t.turns) == min(patches, LENGTH)
    assert all(turn.action.tool_calls[0].name == "check_vpn_status" for turn in t.turns), "its own misses are trained"
    if patches < LENGTH:
        assert (t.stop_reason, t.outcome, t.reward) == (StopReason.TOO_MANY_ERRORS, Outcome.TRUNCATED, 0.0)
    else:
        assert t.outcome is Outcome.SOLVED, "patched throughout, the expert has solved the task"


@pytest.mark.parametrize("patches", [0, 1])
def test_one_miss_is_patched_in_the_history_or_ends_the_episode(patches: int) -> None:
    policy = [None, None, HALF, *[None] * (LENGTH - 3)]
    t = drive(empo(patches=patches, matching="strict"), policy)
    assert len(t.turns) == (LENGTH if patches else 3)
    assert empo(matching="strict").levels(t).tolist()[:3] == [3, 3, 1]
    if patches:
        assert t.turns[2].executed == Action(tool_calls=(expert_calls("telecom", TASK)[2],))
        assert t.turns[3].forks and not t.turns[2].forks
        assert t.outcome is Outcome.SOLVED


def test_sets_match_in_any_order_but_done_and_strict_matching_does_not() -> None:
    calls = [Action(tool_calls=(call,)) for call in expert_calls("telecom", TASK)]
    swapped = [calls[0], calls[2], calls[1], *calls[3:]]
    assert empo().levels(drive(empo(), swapped)).tolist() == [3] * LENGTH
    assert empo(matching="strict").levels(drive(empo(matching="strict"), swapped)).tolist() == [3, 1, 1]
    early = drive(empo(patches=0), [calls[-1]])
    assert len(early.turns) == 1 and empo().levels(early).tolist() == [1]


def test_validation_is_free_of_the_expert() -> None:
    t = drive(empo(patches=0), [WRONG, WRONG, Action(tool_calls=(ToolCall("done"),))], phase="validation")
    assert len(t.turns) == 3 and t.stop_reason is StopReason.AGENT_STOP


def test_progress_task_success_and_their_mean() -> None:
    right = drive(empo(patches=0), [None] * LENGTH)
    early = drive(empo(patches=50), [None, None, WRONG, *[None] * (LENGTH - 3)])
    found = semi_online_score([Group(TASK, [right, early])], empo())
    assert found["TSR"] == 0.5 and found["PG"] == pytest.approx((1 + 2 / LENGTH) / 2), "a patch is no match"
    assert found["Score"] == pytest.approx((found["PG"] + found["TSR"]) / 2)


def test_agreement_of_scores_with_rewards() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.8, 0.9]
    same = agreement([r**3 for r in rewards], rewards)
    assert same["n"] == 8 and same["spearman"] == 1.0 and 0.5 < same["r2"] < 1.0
    assert agreement(rewards[::-1], rewards)["spearman"] == -1.0
    ties = agreement([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0])
    assert ties["spearman"] == ties["r2"] == 0.0 and ties["low"] <= 0.0 <= ties["high"]


def test_the_control_deals_the_credit_of_each_turn_anew_among_those_who_got_there() -> None:
    right, wrong = drive(empo(), [None] * LENGTH), drive(empo(patches=0), [WRONG])
    members = [replace(t, member=i) for i, t in enumerate([right, wrong, right, wrong, wrong, right])]
    method, control = empo(least_deviation=0.0), empo(least_deviation=0.0, shuffle_advantages=True)
    plain, dealt = (m.advantages(Group(TASK, members)) for m in (method, control))
    firsts = [[float(a[0]) for a in of] for of in (plain, dealt)]
    assert sorted(firsts[0]) == sorted(firsts[1]) and firsts[0] != firsts[1]
    assert [len(a) for a in plain] == [len(a) for a in dealt]


def test_an_expert_that_tries_every_remedy_is_followed_too() -> None:
    looks, tries = expert_calls("telecom", TASK), expert_calls("telecom", TASK, diagnose=False)
    assert not any(call.name == "check_network_status" for call in tries) and tries[-1] == looks[-1]
    assert [call.name for call in tries].count("toggle_airplane_mode") == 2, "it stood right, and is flipped back"
    wrong_style = [Action(tool_calls=(call,)) for call in tries]
    assert drive(empo(diagnose=False, patches=0), wrong_style).outcome is Outcome.SOLVED
    assert drive(empo(patches=0), wrong_style).outcome is Outcome.TRUNCATED
