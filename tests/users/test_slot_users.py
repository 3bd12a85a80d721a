"""The scripted customers of retail and airline: what they reveal, agree to and refuse, and when they leave."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
from interviewing import QUESTIONS, WRITES, Interview, interviewed, proposal, started

from sinkflex.envs.check import check_environment
from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users import slots
from sinkflex.users.airline import KINDS as AIRLINE_KINDS
from sinkflex.users.airline import AirlineUser
from sinkflex.users.hearing import ACTS
from sinkflex.users.retail import RetailUser
from sinkflex.users.scripts import entries
from sinkflex.users.slots import AGREED, DETAILS, NO, PATIENCE, RIGHT, UNKNOWN, YES, SlotUser

USERS: dict[str, type[SlotUser]] = {"retail": RetailUser, "airline": AirlineUser}
DOMAINS = sorted(USERS)
TASKS = {domain: [spec.task_id for spec in tasks.load(domain, "base")] for domain in DOMAINS}
EXCHANGE = "I will exchange item 4983901480 for 7747408585 in order #W2378156, paid with {}. Do you confirm (yes/no)?"
NOTICE = "You are being transferred to a human agent. Please hold on."
CLOSING = "Is there anything else I can help you with?"


@cache
def interviews(domain: str) -> dict[str, Interview]:
    return {task_id: interviewed(domain, task_id) for task_id in TASKS[domain]}


def scenario(domain: str, task_id: str) -> str:
    words = tasks.read(domain, task_id).user_scenario.instructions
    return f"{words.reason_for_call} {words.known_info} {words.unknown_info} {words.task_instructions}"


# --- Bars ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "count"), [("retail", 114), ("airline", 50)])
def test_an_interview_solves_every_task_and_every_gold_change_is_agreed_to(domain: str, count: int) -> None:
    talks = interviews(domain)
    assert [task_id for task_id, talk in talks.items() if talk.reward == 1.0 and not talk.refused] == TASKS[domain]
    assert len(talks) == count


@pytest.mark.parametrize(("domain", "count"), [("retail", 11), ("airline", 20)])
def test_without_its_last_change_an_interview_is_paid_only_where_gold_changes_nothing(domain: str, count: int) -> None:
    paid = [task_id for task_id in TASKS[domain] if interviewed(domain, task_id, skip_last_write=True).reward == 1.0]
    unchanged = [task_id for task_id in TASKS[domain] if not changes_something(domain, task_id)]
    assert paid == unchanged and len(paid) == count


def changes_something(domain: str, task_id: str) -> bool:
    talk = interviews(domain)[task_id]
    idle = started(domain, task_id)
    return idle.env.score().parts["DB"] == 0.0 and talk.reward == 1.0


@pytest.mark.parametrize(("domain", "count"), [("retail", 7), ("airline", 19)])
@pytest.mark.parametrize("line", ["Okay.", CLOSING, "I cannot do that."])
def test_an_agent_that_does_nothing_ends_soon_and_is_paid_no_more_than_the_floor(
    domain: str, count: int, line: str
) -> None:
    solved = 0
    for task_id in TASKS[domain]:
        talk = started(domain, task_id)
        for _ in range(15):
            talk.say(line)
        assert talk.info["stop_reason"] is StopReason.USER_STOP and talk.info["turns"] <= 2 * PATIENCE + 2
        solved += talk.reward == 1.0
    assert solved == count


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_environment_conforms_with_a_scripted_customer(domain: str) -> None:
    check_environment(partial(Tau2Env, domain, "base"))


# --- What is revealed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_first_words_are_short_and_reveal_no_id_name_payment_or_address(domain: str) -> None:
    for task_id, talk in interviews(domain).items():
        opening, criteria = talk.replies[0], tasks.read(domain, task_id).evaluation_criteria
        facts: set[str] = set()
        for action in criteria.actions or ():
            if action.name in WRITES:
                facts |= set(
                    re.findall(r"#W\d+|\b\d{10}\b|\b\w+_\d{4,}\b|\b[A-Z0-9]{6}\b|HAT\d+", str(action.arguments))
                )
                facts |= {action.arguments[k] for k in ("address1", "zip") if k in action.arguments}
        facts |= set(re.findall(r"\b[a-z]+_[a-z]+_\d+|\S+@\S+|\b\d{5}\b", scenario(domain, task_id)))
        assert not [fact for fact in facts if fact in opening], task_id
        assert len(opening.split()) <= 50 and not re.search(r"\b[Yy]ou (?:are|want|do)\b", opening), task_id


def test_a_slot_is_revealed_when_it_is_asked_for_and_not_before() -> None:
    talk = started("retail", "105")
    kettle = "the tea kettle (material glass, capacity 2 liters and stovetop compatibility induction)"
    facts = {
        "identity": "My name is Aarav Anderson and my zip code is 19031. I do not remember my email address.",
        "order": "The order number is #W4316152.",
        "items": f"It is {kettle}; {kettle}.",
        "new": "I would like the tea kettle with material ceramic, capacity 2 liters and stovetop compatibility gas; "
        "the tea kettle with material glass, capacity 1.5 liters and stovetop compatibility gas.",
        "payment": "Please use my gift card.",
        "reason": UNKNOWN,
        "address": UNKNOWN,
    }
    assert talk.replies == ["Hello, I would like to exchange 2 tea kettles."]
    for topic, question in QUESTIONS["retail"].items():
        assert talk.say(question) == facts[topic]


def test_an_airline_customer_reveals_a_booking_slot_by_slot() -> None:
    talk = started("airline", "8")
    said = {topic: talk.say(question) for topic, question in QUESTIONS["airline"].items()}
    assert said["identity"] == "My name is Sophia Silva. My user id is sophia_silva_7557."
    assert said["reservation"] == UNKNOWN
    assert said["route"] == "From ORD to PHL, one way."
    assert said["cabin"] == "I want economy."
    assert said["passengers"] == "Me and Kevin Smith, born 2001-04-12. My birthday is in my profile."
    assert said["bags"] == "I need no checked bags." and said["insurance"] == "I want no insurance."


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_agent_that_asks_everything_at_once_is_told_everything_at_once(domain: str) -> None:
    task_id = {"retail": "105", "airline": "35"}[domain]
    one_by_one = started(domain, task_id)
    wanted = [one_by_one.say(question) for question in QUESTIONS[domain].values()]
    assert started(domain, task_id).say(" ".join(QUESTIONS[domain].values())) == " ".join(
        text for text in wanted if text != UNKNOWN
    )


def test_several_changes_are_told_apart_by_what_they_are_about() -> None:
    talk = started("retail", "76")
    assert talk.say("What are the order numbers?") == "To cancel an order: #W8367380 and #W1242543."
    assert talk.say("For what reason?") == (
        "For order #W8367380: ordered by mistake. For order #W1242543: no longer needed."
    )
    assert talk.say("Why should I cancel #W1242543?") == "The reason is: no longer needed."


# --- What is agreed to -----------------------------------------------------------------------------------------


def test_a_change_is_agreed_to_if_its_ids_are_the_wanted_ones_and_all_of_them() -> None:
    def verdict(text: str) -> str:
        return started("retail", "1").say(text)

    wish = "I would like to exchange the smart thermostat."
    assert verdict(EXCHANGE.format("credit_card_9513926")) == YES
    assert verdict(EXCHANGE.format("your credit card")) == YES
    assert verdict(EXCHANGE.format("your PayPal account")) == f"{NO} {wish}"
    assert verdict(EXCHANGE.format("paypal_1234567")) == f"{NO} {wish}"
    assert verdict(EXCHANGE.replace("7747408585", "7747408586").format("credit_card_9513926")) == f"{NO} {wish}"
    assert verdict(EXCHANGE.replace("#W2378156", "#W2378157").format("credit_card_9513926")) == f"{NO} {wish}"
    assert verdict("Shall I exchange item 4983901480 of order #W2378156?") == f"{NO} {wish}"
    assert verdict("Shall I return item 4983901480 of order #W2378156?") == f"{NO} {wish}"
    assert verdict("Would you like me to cancel order #W2378156?") == f"{NO} {wish}"
    assert verdict("Would you like me to exchange the thermostat?") == f"{AGREED} {DETAILS}"
    assert verdict("Would you like me to exchange it in order #W2378156?") == f"{AGREED} {DETAILS}"
    assert verdict("Do you want to proceed?") == DETAILS
    assert verdict("Order #W2378156, is that correct?") == RIGHT
    assert verdict("Shall I look up your orders?") == "Yes, please."


def test_several_changes_can_be_agreed_to_in_one_message() -> None:
    gold = [a for a in tasks.read("retail", "23").evaluation_criteria.actions if a.name in WRITES]
    together = "; ".join(proposal(a.name, a.arguments) for a in gold)
    talk = started("retail", "23")
    assert talk.say(f"I will {together}. Do you confirm?") == YES
    assert talk.say(CLOSING).endswith("Goodbye.") and talk.info["stop_reason"] is StopReason.USER_STOP
    assert NO in started("retail", "23").say(f"I will {together} and cancel order #W9609649. Do you confirm?")


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_reply_that_agrees_or_refuses_ends_the_conversation(domain: str) -> None:
    for talk in interviews(domain).values():
        assert not re.search(rf"{re.escape(YES)}|{re.escape(NO)}", talk.replies[-1])


def test_a_customer_asks_for_what_is_open_once_and_leaves() -> None:
    talk = started("retail", "113")
    assert talk.say(CLOSING) == "I would still like to cancel 2 orders."
    assert talk.say("I will cancel order #W5056519 (ordered by mistake). Do you confirm?") == YES
    assert talk.say("It has been cancelled.") == "I would also like to cancel an order."
    assert talk.say("That is done.") == slots.FAREWELL
    assert talk.info["stop_reason"] is StopReason.USER_STOP and talk.reward == 0.0


def test_a_wrong_reason_cabin_or_number_of_bags_is_noticed() -> None:
    assert NO in started("retail", "113").say("I will cancel order #W5056519 (no longer needed). Do you confirm?")
    bags = "I will add {} bags to FQ8APE, paid with gift_card_8190333. Do you confirm?"
    assert YES in started("airline", "17").say(bags.format(3)) and NO in started("airline", "17").say(bags.format(4))
    cabin = "I will change FQ8APE to {}, paid with gift_card_8190333. Do you confirm?"
    assert YES in started("airline", "17").say(cabin.format("economy"))
    assert NO in started("airline", "17").say(cabin.format("business"))


def test_what_the_scenario_asks_for_is_agreed_to_even_where_policy_forbids_it() -> None:
    talk = started("airline", "26")
    assert talk.say("I will cancel reservation 3FRNFB. Do you confirm?") == YES
    talk.call("cancel_reservation", {"reservation_id": "3FRNFB"})
    talk.say(CLOSING)
    assert talk.info["stop_reason"] is StopReason.USER_STOP and talk.reward == 0.0


def test_any_compensation_is_accepted_where_one_is_wanted() -> None:
    offer = "I can offer you a certificate of $999. Would you like that?"
    assert started("airline", "4").say(offer) == YES and started("airline", "18").say(offer) != YES


def test_a_customer_is_transferred_and_agrees_only_if_the_scenario_wants_it() -> None:
    talk = started("retail", "0")
    assert talk.say("Would you like me to transfer you to a human agent?") == "No, I do not want to be transferred."
    assert talk.say("I cannot transfer you to a human agent.") != "Okay, thank you."
    assert talk.say("Your refund will be transferred to your gift card.") == "Okay."
    assert talk.say(NOTICE) == "Okay, thank you." and talk.info["stop_reason"] is StopReason.TRANSFER
    assert started("retail", "50").say("Shall I transfer you to a human agent?") == "Yes, please."


# --- Conditional scenarios -------------------------------------------------------------------------------------


def test_retail_5_changes_its_mind_at_each_confirmation() -> None:
    talk = started("retail", "5")
    exchange = "I will exchange items 8538875209 and 8384507844 in order #W6390527. Do you confirm?"
    assert talk.say(exchange) == "Actually, please exchange only the desk lamp."
    assert (
        talk.say(exchange) == "I changed my mind. Do not exchange anything, I want to return the water bottle instead."
    )
    assert NO in talk.say(exchange)
    refund = "I will return item 8538875209 of order #W6390527 to paypal_7644869. Do you confirm?"
    assert talk.say(refund) == YES


def test_retail_10_swears_and_asks_for_a_human() -> None:
    talk = started("retail", "10")
    assert talk.say("I am sorry, that is not possible.") == "Damn, that is ridiculous! Just do it."
    assert talk.say("I cannot do it.") == "Damn it. Then get me a human representative."
    talk.say(NOTICE)
    assert talk.info["stop_reason"] is StopReason.TRANSFER and talk.reward == 1.0


def test_retail_30_asks_for_one_thing_at_a_time() -> None:
    talk = started("retail", "30")
    assert talk.replies == [
        "My tablet was damaged when I opened the package. What is the tracking number of that order?"
    ]
    assert "exchange the tablet" in talk.say("It is 746342064230.")
    assert talk.say("I will return item 3788616824 of order #W2692684 to gift_card_7711863. Do you confirm?") == YES
    assert "cancel the charger" in talk.say(f"It has been returned. {CLOSING}")
    assert talk.say("I will cancel order #W9373487 (no longer needed). Do you confirm?") == YES
    assert "return the sneakers" in talk.say(f"It has been cancelled. {CLOSING}")


def test_retail_46_gives_the_order_number_at_the_third_try() -> None:
    talk = started("retail", "46")
    assert talk.say("What is the order number?") == "It is 9502126."
    assert talk.say("I could not find that order. Could you double check the order number?").endswith("it is 9502127.")
    assert talk.say("I cannot find that order either.") == "I forgot the W at the beginning: W9502127."


def test_airline_7_upgrades_first_and_thinks_of_something_else_in_the_third_message() -> None:
    talk = started("airline", "7")
    assert talk.say("Which reservations?") == "XEHM4B and 59XX6W."
    assert talk.say("XEHM4B is basic economy.") == "Then upgrade it to economy first, and cancel it after that."
    assert "other upcoming flights" in talk.say("I see.")


def test_airline_11_finds_its_reservation_in_the_third_message() -> None:
    talk = started("airline", "11")
    assert talk.say("What is your reservation id?") == "I do not remember it."
    assert talk.say("What is your user id?").endswith("james_patel_9828.")
    assert talk.say("One moment.") == "I just found the reservation id in my email: it is GV1N64."
    assert "downgrade all passengers" in talk.say("I cannot remove only one passenger.")


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_reviewed_entries_are_well_formed_and_hold_only_facts_of_their_scenario(domain: str) -> None:
    user = USERS[domain]
    known = {"opening", "question", "answers", "rules", "human", "accepts"}
    for task_id, entry in entries(domain).items():
        assert (
            task_id in TASKS[domain] and entry.keys() <= known and entry.get("answers", {}).keys() <= user.topics.keys()
        )
        for trigger, _ in entry.get("rules", ()):
            if trigger[0] == "~":
                re.compile(trigger[1:])
            else:
                assert set(trigger.split(", ")) <= {*user.topics, *ACTS, "later"}, (task_id, trigger)
        for accepted in entry.get("accepts", ()):
            assert accepted.partition(" ")[0] in AIRLINE_KINDS
        words = [entry.get("opening", ""), entry.get("question", ""), *entry.get("answers", {}).values()]
        words += [text for _, text in entry.get("rules", ())]
        facts = set(re.findall(r"\$?[A-Z]*\d[\w,]*\d\w*", " ".join(words)))
        told = scenario(domain, task_id).replace("1000-piece", "1000 pieces")
        gold = str([action.arguments for action in tasks.read(domain, task_id).evaluation_criteria.actions or ()])
        assert not [fact for fact in facts if fact.strip("$") not in told + gold], (task_id, facts)
        assert all(len(text.split()) <= 50 for text in words), task_id


def test_a_task_without_an_entry_is_played_from_its_gold_changes_alone() -> None:
    task = tasks.read("retail", "5").model_copy(update={"id": "made up"})
    user = RetailUser()
    assert user.reset(task, 0).text == "Hello, I would like to return the water bottle."
    assert user.reply("I will return item 8538875209 of order #W6390527 to paypal_7644869. Do you confirm?").text == YES
