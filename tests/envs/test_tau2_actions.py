"""The agent's turn: calls, texts, unusable actions, refusals, argument coercion, and playing solo."""

from __future__ import annotations

from typing import Any

import pytest
from tau2_play import SLOW_DATA, calls, solo, telecom

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.envs.tau2 import actions, policies, tasks
from sinkflex.envs.tau2.database import state_hash
from sinkflex.envs.tau2.env import Tau2Env


def test_calls_run_in_order_and_are_answered_in_order_under_their_ids():
    env = telecom()
    observation, *_ = env.step(
        Action(
            tool_calls=(
                ToolCall("get_customer_by_phone", {"phone_number": "555-123-2002"}, "a"),
                ToolCall("get_details_by_id", {"id": "L9999"}, "b"),
                ToolCall("get_details_by_id", {"id": "L1002"}),
            )
        )
    )
    assert [m.tool_call_id for m in observation] == ["a", "b", "call_1_2"]
    assert [m.error for m in observation] == [False, True, False]
    assert "John Smith" in observation[0].content and "L9999" in observation[1].content


def test_a_mapping_is_an_action_too():
    env = telecom()
    observation, *_ = env.step({"tool_calls": [{"name": "get_details_by_id", "arguments": {"id": "L1002"}}]})
    assert not observation[0].error


def test_text_beside_calls_reaches_nobody():
    env = telecom()
    env.step(Action("I will look.", (ToolCall("get_details_by_id", {"id": "L1002"}),)))
    assert env.episode.user.heard == [] and policies.GREETING in env.episode.texts and len(env.episode.texts) == 1


@pytest.mark.parametrize(
    "action",
    [Action(error="bad JSON"), Action(), Action(text="  "), Action(text="<think>a</think>"), Action(text="###STOP###")],
)
def test_an_unusable_action_costs_a_turn_and_reaches_nobody(action):
    env = telecom()
    before = state_hash(env.episode.world)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation[0].role == "tool" and observation[0].error
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["turns"], info["errors"], info["parse_errors"]) == (1, 1, 1)
    assert env.episode.user.heard == [] and state_hash(env.episode.world) == before


def test_the_user_hears_neither_thoughts_nor_stop_tokens():
    env = telecom()
    _, _, terminated, truncated, _ = env.step(Action(text="<think>###STOP### secret</think> Hello ###TRANSFER###there"))
    assert env.episode.user.heard == ["Hello there"] and not terminated and not truncated
    env.step(Action(text="Hi <think>never closed"))
    assert env.episode.user.heard[-1] == "Hi"


def test_a_call_of_the_users_tool_says_whose_it_is():
    env = telecom()
    before = state_hash(env.episode.world)
    observation, *_, info = env.step(calls("toggle_data_saver_mode"))
    assert observation[0].error and "tool of the user: ask them" in observation[0].content
    assert (info["wrong_owner_calls"], info["unknown_tool_calls"], info["errors"]) == (1, 0, 1)
    assert state_hash(env.episode.world) == before


def test_a_call_of_an_unknown_tool_names_the_nearest():
    observation, *_, info = telecom().step(calls("get_customer_by_fone", phone_number="1"))
    assert observation[0].error and "'get_customer_by_phone'" in observation[0].content
    assert (info["wrong_owner_calls"], info["unknown_tool_calls"]) == (0, 1)


def test_every_call_over_the_limit_is_refused():
    env = telecom(max_errors=10_000)
    observation, *_ = env.step(calls(*["get_details_by_id"] * 1000, id="L1002"))
    assert len(observation) == 1000 and len({m.tool_call_id for m in observation}) == 1000
    assert not any(m.error for m in observation[: actions.MAX_CALLS])
    assert all(m.error and "at most 16 calls" in m.content for m in observation[actions.MAX_CALLS :])


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("get_details_by_id", {"id": nested(900)}),
        ToolCall("get_details_by_id", {"id": "[" * 100_000}),
        ToolCall("get_details_by_id", ["L1002"]),
        ToolCall("get_details_by_id", {"id": None}),
        ToolCall("get_details_by_id", {"requestor": "user", "tool_name": "x", "self": 1}),
        ToolCall(["get_details_by_id"], {}),
        ToolCall("", {}),
        ToolCall("get_details_by_id", {1: 2}),
        ToolCall("db", {}),
        ToolCall("refuel_data", {"customer_id": "C1001", "line_id": "L1002", "gb_amount": "many"}),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("coerce_arguments", [True, False])
def test_no_call_breaks_the_environment(call, coerce_arguments):
    env = telecom(coerce_arguments=coerce_arguments)
    observation, *_ = env.step(Action(tool_calls=(call,)))
    assert observation[0].error
    assert not env.step(calls("get_details_by_id", id="L1002"))[0][0].error


@pytest.mark.timeout(20)
def test_a_calculation_cannot_hang_the_environment():
    observation, *_ = solo("retail").step(calls("calculate", expression="9**9**9**9"))
    assert observation[0].error


def test_random_actions_never_break_an_episode():
    for domain in tasks.DOMAINS:
        env = solo(domain, max_turns=200, max_errors=10_000)
        env.action_space.seed(0)
        for _ in range(200):
            action = env.action_space.sample()
            if "done" not in {call.name for call in action.tool_calls} and any(env.step(action)[2:4]):
                break


@pytest.mark.parametrize(
    ("domain", "name", "given", "coerced"),
    [
        ("telecom", "refuel_data", {"gb_amount": "2.0"}, {"gb_amount": 2.0}),
        ("telecom", "get_bills_for_customer", {"limit": 3.0}, {"limit": 3}),
        ("telecom", "get_bills_for_customer", {"limit": "3"}, {"limit": 3}),
        ("telecom", "get_bills_for_customer", {"limit": "many"}, {"limit": "many"}),
        ("telecom", "get_bills_for_customer", {"limit": True}, {"limit": True}),
        ("telecom", "get_details_by_id", {"id": 1002}, {"id": "1002"}),
        ("telecom", "get_details_by_id", {"id": None, "other": "1"}, {"id": None, "other": "1"}),
        ("retail", "find_user_id_by_name_zip", {"zip": 19122}, {"zip": "19122"}),
        ("retail", "return_delivered_order_items", {"item_ids": '["1", 2]'}, {"item_ids": ["1", "2"]}),
        ("airline", "update_reservation_baggages", {"total_baggages": 2.0}, {"total_baggages": 2}),
        ("airline", "book_reservation", {"flights": '[{"flight_number": 1}]'}, {"flights": [{"flight_number": "1"}]}),
        ("airline", "book_reservation", {"passengers": [{"dob": 1}]}, {"passengers": [{"dob": "1"}]}),
        ("mock", "create_task", {"description": None, "title": 5}, {"description": None, "title": "5"}),
        ("mock", "unknown", {"title": 5}, {"title": 5}),
    ],
)
def test_arguments_are_brought_into_the_types_of_their_schema(domain, name, given, coerced):
    result = actions.coerce(domain, ToolCall(name, given)).arguments
    assert result == coerced
    assert [type(value) for value in result.values()] == [type(value) for value in coerced.values()]


def test_coercion_leaves_every_gold_action_as_it_is():
    for domain in tasks.DOMAINS:
        for spec in tasks.load(domain, "base"):
            for gold in tasks.read(domain, spec.task_id).evaluation_criteria.actions or ():
                call = ToolCall(gold.name, gold.arguments)
                assert repr(actions.coerce(domain, call)) == repr(call)


def test_strict_mode_passes_arguments_as_they_are():
    task_id = next(
        spec.task_id
        for spec in tasks.load("retail", "base")
        if any(
            a.name == "find_user_id_by_name_zip" for a in tasks.read("retail", spec.task_id).evaluation_criteria.actions
        )
    )
    gold = tasks.read("retail", task_id).evaluation_criteria.actions
    arguments = next(a.arguments for a in gold if a.name == "find_user_id_by_name_zip")
    failed = {}
    for coerce_arguments in (True, False):
        env = solo("retail", coerce_arguments=coerce_arguments)
        observation, *_ = env.step(calls("find_user_id_by_name_zip", **{**arguments, "zip": int(arguments["zip"])}))
        failed[coerce_arguments] = observation[0].error
    assert failed == {True: False, False: True}


def test_solo_gives_the_ticket_and_both_sides_tools():
    env = Tau2Env("telecom", split="small", solo=True)
    observation, info = env.reset(seed=0, options={"task_id": SLOW_DATA})
    assert observation == (Message("user", env.episode.task.ticket),) and info["user"] == "none"
    assert {tool["function"]["name"] for tool in info["tools"]} >= {"refuel_data", "toggle_data_saver_mode", "done"}
    observation, *_ = env.step(calls("toggle_data_saver_mode"))
    assert "Data Saver Mode is now OFF" in observation[0].content
    observation, reward, terminated, _, info = env.step(calls("done"))
    assert (reward, terminated, info["stop_reason"]) == (1.0, True, StopReason.AGENT_STOP)


def test_done_is_no_tool_where_there_is_a_user():
    env = telecom()
    observation, _, terminated, *_ = env.step(calls("done"))
    assert observation[0].error and not terminated


def test_calls_after_done_do_not_run():
    env = Tau2Env("telecom", split="small", solo=True)
    env.reset(seed=0, options={"task_id": SLOW_DATA})
    observation, reward, terminated, *_ = env.step(calls("done", "toggle_data_saver_mode"))
    assert terminated and reward == 0.0 and [m.error for m in observation] == [False, True]


def test_nobody_reads_a_text_in_solo_telecom():
    observation, *_, info = solo().step(Action(text="Hello."))
    assert observation[0].error and info["parse_errors"] == 1


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_one_text_may_be_written_in_solo_retail_and_airline(domain):
    env = solo(domain)
    instructions = env.episode.task.user_scenario.instructions
    assert instructions.reason_for_call.strip() in env.reset(seed=0)[0][0].content
    assert not env.step(Action(text="It costs 44."))[0][0].error
    assert env.step(Action(text="And 45."))[0][0].error
    assert env.episode.texts == ["It costs 44."]


def test_an_episode_may_start_in_the_middle_of_a_conversation():
    env = Tau2Env("mock", split="base", solo=True)
    observation, _ = env.reset(options={"task_id": "update_task_with_message_history"})
    assert [m.role for m in observation] == ["user", "assistant", "tool", "assistant", "user"]
    assert observation[1].tool_calls[0].name == "create_task"
    assert "task_2" in env.episode.world.tools.db.tasks
