"""Agents that loop, use what is not theirs, flood, or try to end the episode: each has one defined outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.actions import MAX_CALLS, user_tool_names
from sinkflex.envs.tau2.database import state_hash
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.chat import Chat
from sinkflex.rollout.scripted import Dialogue, encode, play
from sinkflex.trajectory import Group, Outcome, read_trajectories, write_trajectories
from tests.policy.tiny_policy import TOOLS, tiny_policy

DOMAINS = ["telecom", "retail", "airline", "mock"]
# A task of each that doing nothing does not solve.
FIRST = {domain: tasks.load(domain, "base")[0].task_id for domain in DOMAINS} | {"airline": "23"}


class Repeats:
    """An agent that does the same in every turn."""

    def __init__(self, act: Callable[[], Action]) -> None:
        self._act = act

    def reset(self, seed: int) -> None:
        pass

    def act(self, messages: list[Message]) -> Action:
        return self._act()


def played(domain: str, act: Callable[[], Action], task_id: str | None = None) -> tuple[Dialogue, Tau2Env]:
    env = Tau2Env(domain, "base", max_turns=30)
    return play(env, Repeats(act), task_id or FIRST[domain], 0), env


def unchanged(env: Tau2Env) -> bool:
    """True if the world is as it was at the start."""
    fresh = Tau2Env(env.domain, "base")
    fresh.reset(seed=0, options={"task_id": env.episode.spec.task_id})
    return state_hash(env.episode.world) == state_hash(fresh.episode.world)


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_agent_that_loops_loses_the_user(domain: str) -> None:
    dialogue, env = played(domain, lambda: Action(text="Let me look into that for you."))
    assert dialogue.info["stop_reason"] is StopReason.USER_STOP and dialogue.info["outcome"] is Outcome.FAILED
    assert dialogue.reward == 0.0 and dialogue.info["reward_parts"] and len(dialogue.exchanges) < 20
    assert unchanged(env)


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_agent_that_loops_over_a_tool_runs_out_of_turns(domain: str) -> None:
    read = {
        "telecom": ("get_customer_by_id", {"customer_id": "C1001"}),
        "retail": ("list_all_product_types", {}),
        "airline": ("list_all_airports", {}),
        "mock": ("get_users", {}),
    }[domain]
    dialogue, env = played(domain, lambda: Action(tool_calls=(ToolCall(*read),)))
    assert dialogue.info["stop_reason"] is StopReason.MAX_TURNS and dialogue.info["outcome"] is Outcome.TRUNCATED
    assert (len(dialogue.exchanges), dialogue.reward, dialogue.info["errors"]) == (30, 0.0, 0) and unchanged(env)


def test_an_agent_that_calls_the_users_tools_is_refused_and_cut_off() -> None:
    own = sorted(user_tool_names("telecom"))
    dialogue, env = played("telecom", lambda: Action(tool_calls=tuple(ToolCall(name) for name in own[:4])))
    info = dialogue.info
    assert info["stop_reason"] is StopReason.TOO_MANY_ERRORS and info["outcome"] is Outcome.TRUNCATED
    assert info["wrong_owner_calls"] == info["errors"] == 12 and dialogue.reward == 0.0 and unchanged(env)
    answers = [message for _, observation in dialogue.exchanges for message in observation]
    assert all(answer.error and "ask them to do it" in answer.content for answer in answers)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", ["transfer_to_human_agents", "no_such_tool"])
def test_two_thousand_calls_in_a_turn_are_answered_one_by_one_and_sixteen_run(domain: str, name: str) -> None:
    calls = tuple(ToolCall(name, {"summary": "x"}, f"c{i}") for i in range(2000))
    dialogue, env = played(domain, lambda: Action(tool_calls=calls))
    ((_, observation),) = dialogue.exchanges
    assert dialogue.info["stop_reason"] is StopReason.TOO_MANY_ERRORS and dialogue.reward == 0.0
    assert [answer.tool_call_id for answer in observation] == [call.id for call in calls]
    refused = [answer for answer in observation if "at most 16 calls run in one turn" in answer.content]
    assert len(refused) == 2000 - MAX_CALLS and all(answer.error for answer in refused)
    ran = [message for actor, message in dialogue.info["record"] if actor == "assistant" and message.tool_calls]
    assert len(ran) == MAX_CALLS and unchanged(env)


@pytest.mark.parametrize("token", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_a_stop_token_ends_nothing_and_is_not_heard(domain: str, token: str) -> None:
    dialogue, _ = played(domain, lambda: Action(text=token))
    assert dialogue.info["stop_reason"] is StopReason.TOO_MANY_ERRORS and dialogue.info["parse_errors"] == 10
    assert not [m for actor, m in dialogue.info["record"] if actor == "assistant"][1:], "nobody heard it"
    dialogue, _ = played(domain, lambda: Action(text=f"One moment. {token}"))
    assert (len(dialogue.exchanges) > 1 or domain == "mock") and token not in str(dialogue.info["record"])
    plain, _ = played(domain, lambda: Action(text="One moment."))
    assert dialogue.info["record"] == plain.info["record"], "with or without it, the user says the same"


def test_stopping_by_a_token_is_not_paid_even_where_doing_nothing_would_be() -> None:
    paid = next(
        spec.task_id
        for spec in tasks.load("airline", "base")
        if played("airline", lambda: Action(text="Thank you."), spec.task_id)[0].reward == 1.0
    )
    dialogue, _ = played("airline", lambda: Action(text="###STOP###"), paid)
    assert dialogue.reward == 0.0 and dialogue.info["outcome"] is Outcome.TRUNCATED


def test_a_stop_token_in_an_argument_is_an_argument() -> None:
    call = ToolCall("transfer_to_human_agents", {"summary": "###STOP###"})
    env = Tau2Env("telecom", "base")
    env.reset(seed=0, options={"task_id": FIRST["telecom"]})
    (answer,), *_, info = env.step(Action(tool_calls=(call,)))
    assert info["stop_reason"] is None and not answer.error


@pytest.mark.parametrize(
    "act",
    [
        lambda: Action(text="Let me look into that for you."),
        lambda: Action(tool_calls=(ToolCall("toggle_data", {}, "c0"),)),
        lambda: Action(text="###STOP### Sure."),
    ],
)
def test_what_odd_agents_do_can_be_encoded_and_read_back(act: Callable[[], Action], tmp_path: Any) -> None:
    dialogue, _ = played("telecom", act)
    chat = Chat(tiny_policy().tokenizer, "", TOOLS)
    trajectory = encode(dialogue, chat, max_tokens=100_000)
    assert trajectory.record == list(dialogue.info["record"]) and trajectory.stop_reason is dialogue.info["stop_reason"]
    groups = [Group(trajectory.task_id, [trajectory])]
    write_trajectories(tmp_path / "t.jsonl.zst", groups)
    assert read_trajectories(tmp_path / "t.jsonl.zst")[0].members[0].record == trajectory.record
