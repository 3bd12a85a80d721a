"""The retail expert: what it solves without gold, that equal seeds play alike, and what it leaves out on demand."""

from __future__ import annotations

import pytest

from sinkflex.envs.env import Message
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.clerk import ClerkAgent
from sinkflex.rollout.scripted import Dialogue, play
from sinkflex.tasks.suites import scored_tasks

KEYBOARD = "0"  # exchange a keyboard and a thermostat


def solved(agent: ClerkAgent, split: str) -> int:
    env = Tau2Env("retail")
    return int(sum(play(env, agent, task.task_id, seed=0).reward for task in scored_tasks("retail", split)))


@pytest.mark.parametrize(("split", "count", "floor"), [("train", 34, 5), ("test", 15, 2)])
def test_the_expert_solves_what_customers_can_say_and_without_changes_only_the_floor(split, count, floor):
    assert solved(ClerkAgent(), split) == count
    assert solved(ClerkAgent(omit=1.0), split) == floor


def a_dialogue(agent: ClerkAgent, seed: int = 0) -> Dialogue:
    return play(Tau2Env("retail"), agent, KEYBOARD, seed)


def test_it_looks_up_proposes_and_changes_in_this_order():
    dialogue = a_dialogue(ClerkAgent())
    calls = [call.name for action, _ in dialogue.exchanges for call in action.tool_calls]
    assert calls == [
        "find_user_id_by_name_zip",
        "get_user_details",
        "get_order_details",
        "get_product_details",
        "get_product_details",
        "exchange_delivered_order_items",
    ]
    assert dialogue.reward == 1.0


def test_equal_seeds_play_alike_and_a_reset_forgets():
    agent = ClerkAgent(rng_seed=1, omit=0.5)
    played = [a_dialogue(agent, seed).exchanges for seed in (0, 0, *range(1, 9))]
    assert played[0] == played[1]
    assert any(other != played[0] for other in played[2:])


def test_a_customer_that_cannot_be_found_is_asked_again_and_nothing_is_called():
    agent = ClerkAgent()
    messages = [Message("user", "Hello.")]
    for _ in range(4):
        action = agent.act(messages)
        assert action.text and not action.tool_calls
        messages += [Message("assistant", action.text), Message("user", "I do not have that information.")]
