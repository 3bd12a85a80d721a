"""Scripted customers and agents that loop, ramble or write nonsense; speed, copies and repeatability."""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interviewing import QUESTIONS, WRITES, proposal, started

from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.users import slots
from sinkflex.users.airline import AirlineUser
from sinkflex.users.retail import RetailUser
from sinkflex.users.slots import PATIENCE, YES, SlotUser
from sinkflex.users.user import UserAction, UserStop

USERS: dict[str, type[SlotUser]] = {"retail": RetailUser, "airline": AirlineUser}
DOMAINS = sorted(USERS)
TASKS = {domain: [spec.task_id for spec in tasks.load(domain, "base")] for domain in DOMAINS}
EXCHANGE = "I will exchange item 4983901480 for 7747408585 in order #W2378156, paid with {}. Do you confirm (yes/no)?"
CLOSING = "Is there anything else I can help you with?"


def playing(domain: str, task_id: str) -> SlotUser:
    user = USERS[domain]()
    user.reset(tasks.read(domain, task_id), 0)
    return user


@pytest.mark.parametrize(
    "line", [QUESTIONS["retail"]["order"], EXCHANGE.format("paypal_1"), "Do you confirm?", "\U0001f600"]
)
def test_an_agent_that_repeats_itself_loses_the_customer(line: str) -> None:
    talk = started("retail", "1")
    for _ in range(PATIENCE + 1):
        talk.say(line)
    assert talk.info["stop_reason"] is StopReason.USER_STOP and talk.replies[-1] == slots.IMPATIENT
    assert talk.info["outcome"] == "failed"


def test_a_change_that_is_confirmed_again_and_again_loses_the_customer_too() -> None:
    talk = started("retail", "1")
    for _ in range(PATIENCE + 2):
        talk.say(EXCHANGE.format("credit_card_9513926"))
    assert talk.replies[1] == YES and talk.replies[-1] == slots.IMPATIENT


@pytest.mark.parametrize("domain", DOMAINS)
def test_stop_tokens_in_the_agents_words_stop_nothing(domain: str) -> None:
    user = playing(domain, "0")
    for token in ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"):
        assert user.fork().reply(token).stop is None
        assert user.fork().reply(f"{token} What is your user id?").stop is None
    talk = started(domain, "0")
    talk.say("###STOP### I am on it.")
    assert talk.info["stop_reason"] is None


PIECES = [
    *"?.\n",
    *("order", "id", "confirm", "yes", "no", "#W2378156", "4983901480", "EHGLP3", "cannot", "please", "what", "cancel"),
    *("done", "human", "$5", "would you like", "anything else", "may i", "transfer you"),
]
NASTY = ["###STOP###", "\x00\ud83d", "?" * 100_000, "a" * 100_000, "\n" * 9000, "\u202e\u0130\u1e9e", "#W" + "1" * 5000]
NASTY += [
    text * 20_000 for text in ("may i ", "confirm your ", "no such ", "1234567890 ", "yes ", "transfer ", "find ")
]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(DOMAINS),
    st.integers(0, 49),
    st.lists(
        st.text(max_size=200) | st.lists(st.sampled_from(PIECES)).map(" ".join) | st.sampled_from(NASTY),
        min_size=1,
        max_size=8,
    ),
)
def test_no_text_breaks_the_customer(domain: str, index: int, texts: list[str]) -> None:
    user = playing(domain, TASKS[domain][index])
    for text in texts:
        action = user.reply(text)
        assert action.text and not action.tool_calls
        if action.stop is not None:
            assert action.stop in UserStop
            break


def test_a_hundred_kilobytes_are_read_up_to_a_limit_and_quickly() -> None:
    for text in NASTY:
        user = playing("retail", "0")
        begin = time.process_time()
        user.reply(text)
        assert time.process_time() - begin < 0.05, text[:20]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_reply_takes_less_than_a_millisecond(domain: str) -> None:
    gold = [a for a in tasks.read(domain, "23").evaluation_criteria.actions if a.name in WRITES][-1]
    lines = [*QUESTIONS[domain].values(), f"I will {proposal(gold.name, gold.arguments)}. Do you confirm?", CLOSING]
    user = playing(domain, "23")
    best = {}
    for line in lines:
        twins = [user.fork() for _ in range(30)]
        begins = [(time.perf_counter(), twin.reply(line), time.perf_counter()) for twin in twins]
        best[line] = statistics.median(end - begin for begin, _, end in begins)
    assert max(best.values()) < 1e-3, best


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_fork_and_a_pickle_go_their_own_way(domain: str) -> None:
    user = playing(domain, "23")
    lines = list(QUESTIONS[domain].values())
    user.reply(lines[0])
    twin, stored = user.fork(), pickle.dumps(user)
    assert len(stored) < 50_000

    def said(who: Any) -> list[UserAction]:
        return [who.reply(line) for line in lines]

    expected = said(twin)
    assert said(pickle.loads(stored)) == expected and said(user) == expected
    for _ in range(PATIENCE + 2):
        last = twin.reply(lines[0])
    assert last.stop is UserStop.STOP and user.reply("Okay.").stop is None


def test_equal_tasks_give_equal_conversations_and_a_used_customer_starts_anew() -> None:
    user = playing("retail", "46")
    first = [user.reply(question).text for question in QUESTIONS["retail"].values()]
    user.reset(tasks.read("retail", "46"), 7)
    assert [user.reply(question).text for question in QUESTIONS["retail"].values()] == first
