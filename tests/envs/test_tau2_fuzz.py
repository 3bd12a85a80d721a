"""Random calls through our environment and the package's own: equal answers at each call, equal hashes at the end.

A sequence has 1 to 20 calls, of the agent and of the user, in a task's initial state. A call is the gold call of some
task, as it is, with arguments of other calls of the tool, with arguments missing or too many, with values of other
types, or it has a name that no tool has.
"""

from __future__ import annotations

import random
import string
from functools import cache
from typing import Any

import pytest
from tau2.data_model.message import ToolCall as PackageCall
from tau2.environment.environment import Environment

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.envs.tau2 import actions, scoring, tasks
from sinkflex.envs.tau2.database import state_hash, template
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users.user import UserAction

MADE_UP = ("find_order", "get_user_detail", "cancel", "toggle_wifi", "", "db", "__init__", "tools", "get_tools")


class Puppet:
    """A user that makes the call it is given."""

    kind = "scripted"
    call = ToolCall("", {})

    def reset(self, task: Any, seed: int) -> UserAction:
        return UserAction(text="Hello.")

    def reply(self, text: str) -> UserAction:
        return UserAction(tool_calls=(self.call,))

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        self.answer = results[0]
        return UserAction(text="Done.")


@cache
def good_arguments(domain: str) -> dict[str, list[dict[str, Any]]]:
    """Arguments of the gold calls by tool; tools that gold never calls have none."""
    found: dict[str, list[dict[str, Any]]] = {}
    for spec in tasks.load(domain, "base"):
        for action in tasks.read(domain, spec.task_id).evaluation_criteria.actions or ():
            found.setdefault(action.name, []).append(action.arguments)
    return found


@cache
def named(domain: str) -> dict[str, list[Any]]:
    """Every argument of every gold call, by its name."""
    found: dict[str, list[Any]] = {}
    for arguments in (call for calls in good_arguments(domain).values() for call in calls):
        for key, value in arguments.items():
            found.setdefault(key, []).append(value)
    return found


@cache
def values(domain: str) -> list[Any]:
    """Every argument of every gold call, and the keys of the database's tables."""
    known = [value for arguments in named(domain).values() for value in arguments]
    tables = [table for _, table in template(domain).tools.db if isinstance(table, dict) or hasattr(table, "base")]
    return known + [key for table in tables for key in list(table)[:200]]


def random_value(rng: random.Random, domain: str) -> Any:
    """A value that is likely to be of the wrong type or to name something else."""
    return rng.choice(
        [
            rng.choice(values(domain)),
            rng.choice(values(domain)),
            rng.randrange(-5, 2**33),
            rng.uniform(-10, 1e4),
            rng.choice([True, False, None, 2.0, float(10**18), "", "2.0", "true", "null", "[1]", "{}", "\u2603" * 50]),
            "".join(rng.choices(string.printable.replace("*", ""), k=rng.randrange(12))),
            [rng.choice(values(domain)) for _ in range(rng.randrange(3))],
            {rng.choice(("a", "name", "amount", "payment_id")): rng.choice(values(domain))},
        ]
    )


def random_call(rng: random.Random, domain: str) -> tuple[str, ToolCall]:
    """Return who calls, and the call."""
    schemas = {s["function"]["name"]: s["function"]["parameters"] for s in actions.agent_tools(domain, False)}
    users = {s["function"]["name"]: s["function"]["parameters"] for s in actions.user_tools(domain)}
    actor = "user" if users and rng.random() < 0.5 else "assistant"
    if rng.random() < 0.05:  # the other side's tool, a name with a slip, or a name that is made up
        return actor, ToolCall(rng.choice([*schemas, *users, *(name[:-1] for name in schemas), *MADE_UP]), {})
    name, schema = rng.choice(list((users if actor == "user" else schemas).items()))
    known = good_arguments(domain).get(name)
    properties = list(schema.get("properties", {}))
    arguments = (
        dict(rng.choice(known))
        if known
        else {key: rng.choice(named(domain).get(key) or values(domain)) for key in properties}
    )
    how = rng.random()
    if how < 0.3 and known:  # half-valid: arguments of several calls of the tool
        arguments = {key: rng.choice(known).get(key, value) for key, value in arguments.items()}
    elif how < 0.6 and arguments:  # wrong types, other records, lists in another order
        for key in rng.sample(list(arguments), rng.randrange(1, len(arguments) + 1)):
            value = arguments[key]
            shuffled = rng.sample(value, len(value)) if isinstance(value, list) else str(value)
            arguments[key] = rng.choice([shuffled, random_value(rng, domain)])
    elif how < 0.7 and arguments:
        del arguments[rng.choice(list(arguments))]
    elif how < 0.75:
        arguments[rng.choice(("extra", "user", "reason", "order_id", "name"))] = random_value(rng, domain)
    return actor, ToolCall(name, arguments)


def plain_answer(world: Environment, actor: str, call: ToolCall) -> tuple[str, bool]:
    """What the package's own environment says."""
    request = PackageCall.model_construct(id="1", name=call.name, arguments=dict(call.arguments), requestor=actor)
    answer = world.get_response(request)
    if answer.error:  # the package skips its sync after a call that failed midway; ours does not
        world.sync_tools()
    return answer.content, answer.error


def our_answer(env: Tau2Env, user: Puppet, actor: str, call: ToolCall) -> tuple[str, bool]:
    """What the tools say in ours, without the hint that an agent gets when it has no such tool."""
    if actor == "user":
        user.call = call
        env.step(Action(text="Please do it."))
        return user.answer.content, user.answer.error
    (answer,), *_ = env.step(Action(tool_calls=(call,)))
    if call.name not in actions.agent_tool_names(env.domain, env.solo):
        hint = f" {actions.not_found_hint(env.domain, call.name, env.solo)}"
        assert answer.content.endswith(hint)
        return answer.content.removesuffix(hint), answer.error
    return answer.content, answer.error


def rename_new_bills(ours: Environment, plain: Environment) -> None:
    """Give the bills that the package has just opened, whose ids it draws at random, the ids that ours have."""
    for our_bill, bill in zip(ours.tools.db.bills, plain.tools.db.bills, strict=True):
        if our_bill.bill_id != bill.bill_id:
            ids = plain.tools.get_customer_by_id(bill.customer_id).bill_ids
            ids[ids.index(bill.bill_id)] = bill.bill_id = our_bill.bill_id


def play(rng: random.Random, domain: str, coerce_arguments: bool, plain: Environment) -> int:
    """Play a random sequence on both sides and return the number of calls."""
    solo = domain in ("telecom", "mock") and rng.random() < 0.3
    user = Puppet()
    env = Tau2Env(domain, "base", solo, lambda: user, 10**6, 10**6, coerce_arguments)
    spec = rng.choice(tasks.load(domain, "base"))
    env.reset(seed=0, options={"task_id": spec.task_id})
    scoring.initialize(plain, tasks.read(domain, spec.task_id))
    plain.solo_mode = solo
    length = rng.randrange(1, 21)
    for _ in range(length):
        actor, call = random_call(rng, domain)
        actor = "assistant" if solo else actor
        ours = our_answer(env, user, actor, call)
        passed = actions.coerce(domain, call) if coerce_arguments and actor == "assistant" else call
        assert ours == plain_answer(plain, actor, passed), f"{spec.task_id}: {actor} {call}"
        if domain == "telecom":
            rename_new_bills(env.episode.world, plain)
    assert state_hash(env.episode.world) == (plain.get_db_hash(), plain.get_user_db_hash())
    return length


# About 100 sequences in the quick suite; 2,000 with about 20,000 calls in the slow one.
QUICK = {"telecom": 56, "retail": 14, "airline": 6, "mock": 24}
SLOW = {"telecom": 800, "retail": 700, "airline": 200, "mock": 300}


@pytest.mark.filterwarnings("ignore")  # the package warns while it serializes values of other types
@pytest.mark.parametrize(
    ("domain", "sequences"),
    [
        *QUICK.items(),
        *(pytest.param(*item, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]) for item in SLOW.items()),
    ],
)
def test_random_calls_give_the_packages_answers_and_hashes(domain, sequences, new_plain_world):
    rng = random.Random(f"{domain} {sequences}")
    calls = sum(play(rng, domain, bool(i % 2), new_plain_world(domain)) for i in range(sequences))
    assert calls > 5 * sequences
