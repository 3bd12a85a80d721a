"""Practice tasks of retail: no customer of a test task, wishes that can be granted, and the clerk that grants them."""

from __future__ import annotations

import pytest

from sinkflex.demonstrations import fulfilled
from sinkflex.envs.env import Action, ToolCall
from sinkflex.envs.tau2 import practice, tasks
from sinkflex.envs.tau2.database import template
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.clerk import ClerkAgent
from sinkflex.rollout.scripted import Dialogue, play
from sinkflex.users.retail import KINDS

NAMES = [practice.name(0, number) for number in range(200)]


def wishes(task_id: str) -> list[ToolCall]:
    actions = tasks.read("retail", task_id).evaluation_criteria.actions
    return [ToolCall(action.name, action.arguments) for action in actions]


def owners(calls: list[ToolCall]) -> set[str]:
    orders = template("retail").tools.db.orders
    named = {call.arguments["user_id"] for call in calls if "user_id" in call.arguments}
    return named | {orders.peek(order).user_id for call in calls if (order := call.arguments.get("order_id")) in orders}


def test_nobody_of_a_test_task_is_a_customer():
    tested = set.union(*(owners(wishes(spec.task_id)) for spec in tasks.load("retail", "test")))
    practiced = set.union(*(owners(wishes(name)) for name in NAMES))
    assert len(tested) > 20 and len(practiced) > 100 and not tested & practiced


def test_a_name_is_a_task_and_another_name_another_one():
    built = [practice.build(name, "") for name in NAMES[:20]]
    assert built == [practice.build(name, "") for name in NAMES[:20]]
    assert len({task.model_dump_json(exclude={"id"}) for task in built}) == 20
    assert practice.build(practice.name(1, 0), "").user_scenario != built[0].user_scenario


def test_every_change_that_the_shop_makes_is_wished_for():
    assert {call.name for name in NAMES for call in wishes(name)} == set(KINDS)


def played(task_id: str) -> Dialogue:
    return play(Tau2Env("retail"), ClerkAgent(), task_id, seed=0)


def test_the_clerk_grants_most_wishes_and_each_by_a_call_that_succeeds():
    happy = [dialogue for dialogue in map(played, NAMES) if fulfilled(dialogue)]
    assert len(happy) > 0.8 * len(NAMES)
    for dialogue in happy:
        made = [call for action, _ in dialogue.exchanges for call in action.tool_calls if call.name in KINDS]
        assert sorted(call.name for call in made) == sorted(wish.name for wish in wishes(dialogue.task_id))


@pytest.mark.parametrize("what", ["nothing is done", "a call fails"])
def test_a_customer_without_what_they_want_is_not_fulfilled(what):
    env, fails = Tau2Env("retail"), Action(tool_calls=(ToolCall("get_user_details", {"user_id": "nobody"}),))

    class Idle(ClerkAgent):
        def act(self, messages):
            if what == "a call fails" and len(messages) == 1:
                return fails
            return super().act(messages[:1] + messages[3:]) if what == "a call fails" else Action(text="Goodbye.")

    assert fulfilled(played(NAMES[0])) and not fulfilled(play(env, Idle(), NAMES[0], seed=0))


def test_practice_is_retails_alone():
    with pytest.raises(ValueError, match="airline has no task"):
        tasks.spec("airline", NAMES[0])
