from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.actions import user_tool_names
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users.telecom import CLARIFICATION, PATIENCE, READY, THANKS, TelecomUser
from sinkflex.users.telecom_phrases import MODES, SENTENCES, SWITCHES, Request, report, requests, status_bar, verbalize
from sinkflex.users.user import UserAction, UserStop

BASE = [spec.task_id for spec in tasks.load("telecom", "base")]
NOTICE = "You are being transferred to a human agent. Please hold on."
REASSURANCE = "Yes, it is safe. Please go ahead."
EXAMPLES = {
    "set_network_mode_preference": {"mode": "4g_5g_preferred"},
    "grant_app_permission": {"app_name": "messaging", "permission": "sms"},
    "check_app_status": {"app_name": "messaging"},
    "check_app_permissions": {"app_name": "browser"},
    "set_apn_settings": {"apn_settings": {"apn_name": "internet"}},
}


def find(family: str, persona: str, *faults: str) -> str:
    """Return the task with the fewest faults that has these, and can be solved."""
    known = [spec for spec in tasks.load("telecom", "full") if spec.tags["family"] == family]
    fitting = [spec for spec in known if spec.tags["persona"] == persona and all(f in spec.task_id for f in faults)]
    return min((s for s in fitting if "sim_card_pin" not in s.task_id), key=lambda s: s.tags["faults"]).task_id


def started(task_id: str, seed: int = 0) -> Tau2Env:
    env = Tau2Env("telecom", "full")
    env.reset(seed=seed, options={"task_id": task_id})
    return env


def say(env: Tau2Env, text: str) -> tuple[str, dict[str, Any]]:
    """Say something to the user, reassure it if it asks back, and return its answer."""
    observation, *_, info = env.step(Action(text=text))
    answer = observation[0].content if observation else ""
    if "Just to be sure" in answer or "Will I lose" in answer:
        return say(env, REASSURANCE)
    return answer, info


def verbalized_gold(task_id: str) -> float:
    """Play the gold actions: the agent's as calls, the user's as requests in words. Return the reward."""
    env = started(task_id)
    info: dict[str, Any] = {"stop_reason": None}
    for gold in tasks.read("telecom", task_id).evaluation_criteria.actions:
        if info["stop_reason"] is None and gold.requestor == "user":
            info = say(env, verbalize(gold.name, gold.arguments))[1]
        elif info["stop_reason"] is None:
            info = env.step(Action(tool_calls=(ToolCall(gold.name, gold.arguments),)))[-1]
            if gold.name == "transfer_to_human_agents":
                info = say(env, NOTICE)[1]
    if info["stop_reason"] is None:
        info = say(env, "Is it working now?")[1]
    return float(info.get("outcome") == "solved")


def test_gold_actions_put_into_words_solve_every_base_task() -> None:
    failed = [task_id for task_id in BASE if verbalized_gold(task_id) != 1.0]
    assert not failed and len(BASE) == 114


@pytest.mark.slow
def test_gold_actions_put_into_words_solve_every_task() -> None:
    failed = [spec.task_id for spec in tasks.load("telecom", "full") if verbalized_gold(spec.task_id) != 1.0]
    assert not failed


@pytest.mark.parametrize("line", ["Okay.", "I am looking into it.", "asdf", "Hello, how can I help you?"])
def test_an_agent_that_does_nothing_ends_soon_and_solves_nothing(line: str) -> None:
    outcomes: Counter[str] = Counter()
    for task_id in BASE:
        env = started(task_id)
        info: dict[str, Any] = {"stop_reason": None}
        while info["stop_reason"] is None:
            info = say(env, line)[1]
        assert info["stop_reason"] is StopReason.USER_STOP and info["turns"] <= PATIENCE + 1
        outcomes[info["outcome"]] += 1
    assert outcomes == {"failed": 114}


def test_every_user_tool_has_a_canonical_sentence_that_means_just_that() -> None:
    assert {*SENTENCES, *SWITCHES} == user_tool_names("telecom")
    for tool in user_tool_names("telecom"):
        arguments = EXAMPLES.get(tool, {})
        healthy = SWITCHES[tool].healthy if tool in SWITCHES else None
        assert requests(verbalize(tool, arguments)) == [Request(tool, arguments, healthy)]
        assert len(verbalize(tool, arguments).split()) <= 8
    for tool in SWITCHES:
        for on in (True, False):
            assert requests(verbalize(tool, on=on)) == [Request(tool, on=on)]
    for mode in MODES:
        asked = {"mode": mode}
        tool = "set_network_mode_preference"
        assert requests(verbalize(tool, asked)) == [Request(tool, asked)]


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("Could you check the top of your screen and tell me what icons you see?", "check_status_bar"),
        ("First, let's verify that Airplane Mode is off. Can you check it for me?", "check_network_status"),
        ("It looks like Airplane Mode is on. Could you turn it off?", "toggle_airplane_mode-"),
        ("Is Data Roaming on? If not, please turn it on.", "check_network_status toggle_roaming+"),
        ("I've enabled roaming on your line. Now please toggle data roaming on.", "toggle_roaming+"),
        ("Make sure that Wi-Fi calling is disabled.", "toggle_wifi_calling-"),
        ("Please toggle the data saver.", "toggle_data_saver_mode"),
        ("Toggle airplane mode on and off.", "toggle_airplane_mode+ toggle_airplane_mode-"),
        ("Turn mobile data on, VPN off, and run a speed test.", "toggle_data+ disconnect_vpn run_speed_test"),
        ("Please turn off airplane mode and data saver.", "toggle_airplane_mode- toggle_data_saver_mode-"),
        ("Let's reset your APN settings. After that, please restart your device.", "reset_apn_settings reboot_device"),
        ("After resetting the APN settings, please reboot your phone.", "reboot_device"),
        ("Turn your phone off and on again.", "reboot_device"),
        ("Please remove and reinsert your SIM card.", "reseat_sim_card"),
        ("Could you set the preferred network type to 5G/4G/LTE?", "set_network_mode_preference"),
        ("If you're using a VPN, please disconnect it.", "disconnect_vpn"),
        ("Do you have a VPN turned on?", "check_vpn_status"),
        ("Does your messaging app have storage and SMS permissions?", "check_app_permissions"),
        ("Grant your messaging app both SMS and storage permissions.", "grant_app_permission grant_app_permission"),
        ("Can you try sending a picture message now?", "can_send_mms"),
        ("I've sent a payment request. Please check it and pay it.", "check_payment_request make_payment"),
        ("Please use the `toggle_data` tool to turn mobile data on.", "toggle_data+"),
        ("Try rebooting your phone.", "reboot_device"),
        ("Do not reboot your phone. I will turn on roaming on your line.", ""),
        ("You don't need to turn on roaming.", ""),
        ("Your data is used up. Would you like me to send a payment request?", ""),
    ],
)  # fmt: skip
def test_paraphrases_are_understood(text: str, tools: str) -> None:
    marks = {True: "+", False: "-", None: ""}
    assert " ".join(request.tool + marks[request.on] for request in requests(text)) == tools


def test_a_switch_in_the_state_asked_for_is_left_alone() -> None:
    env = started(find("mobile_data", "None", "airplane_mode_on"))
    assert "Airplane Mode is now OFF. Status bar: " in say(env, "Please turn off airplane mode.")[0]
    assert say(env, "Please turn off airplane mode.")[0] == "Airplane mode is already off."
    calls = [call.name for call in env.episode.calls]
    assert calls == ["check_network_status", "toggle_airplane_mode", "check_network_status"]


def test_the_user_does_not_stop_in_the_turn_in_which_it_acts() -> None:
    env = started(find("service", "None", "airplane_mode_on", "unseat_sim_card"))
    task = tasks.read("telecom", env.episode.spec.task_id)
    fixes = [a for a in task.evaluation_criteria.actions if a.requestor == "user"]
    for gold in fixes:
        answer, info = say(env, verbalize(gold.name))
        assert info["stop_reason"] is None
    assert "signal" in answer and "No Signal" not in answer
    answer, info = say(env, "Is there anything else?")
    assert answer.endswith(THANKS) and info["stop_reason"] is StopReason.USER_STOP


def test_consent_does_not_stop_even_if_the_problem_is_solved() -> None:
    env = started(find("mms", "None", "bad_network_preference"))
    answer, info = say(env, "Please set your network mode to 4G/5G. Would you like to refuel data?")
    assert "refuel 2.0 GB" in answer and info["stop_reason"] is None
    answer, info = say(env, "Please try to send an MMS. Do you want to refuel 2 GB?")
    assert "can send MMS" in answer and "refuel 2.0 GB" in answer and info["stop_reason"] is None
    assert say(env, "Anything else?")[1]["stop_reason"] is StopReason.USER_STOP


def test_the_user_answers_from_its_scenario() -> None:
    env = started(find("mms", "None", "data_usage_exceeded", "user_abroad"))
    opening = env.episode.record[-1][1].content
    assert opening.startswith("I am unable to send MMS messages using my messaging app")
    assert opening.endswith("I am John Smith with phone number 555-123-2002. I am currently abroad in France.")
    assert say(env, "What is your phone number?")[0] == "I am John Smith with phone number 555-123-2002."
    assert say(env, "Where are you now?")[0] == "I am currently abroad in France."
    assert say(env, "How much data should I add?")[0] == "Yes, please refuel 2.0 GB of data."
    assert say(env, "Would you like to change your plan?")[0] == "I do not want to change my plan."
    assert say(env, "Shall I enable roaming?")[0] == "Yes, please go ahead."
    assert say(env, "I have enabled roaming.")[0] == READY
    assert say(env, "Colorless green ideas.")[0] == CLARIFICATION
    assert say(env, "Is it working now?")[0] == "My messaging app cannot send MMS messages."
    assert say(env, "Is it better now? Does it work?")[0].endswith("It is still not fixed.")
    answer, info = say(env, NOTICE)
    assert answer == "Okay, thank you." and info["stop_reason"] is StopReason.TRANSFER


def test_an_agent_that_goes_in_circles_loses_the_user() -> None:
    env = started(find("mobile_data", "None", "data_mode_off"))
    circle = ["Please check your SIM card.", "Please check your VPN.", "Please run a speed test."]
    for turn in range(20):
        info = say(env, circle[turn % 3])[1]
        if info["stop_reason"]:
            break
    assert info["stop_reason"] is StopReason.USER_STOP and info["outcome"] == "failed" and info["turns"] <= 10


def test_personas_take_one_two_or_all_steps() -> None:
    text = "Please turn on mobile data, turn off data saver and run a speed test."
    known = "mobile_data", "data_mode_off", "data_saver_mode_on"

    def calls(persona: str) -> tuple[list[str], str]:
        env = started(find(known[0], persona, *known[1:]))
        answer, _ = say(env, text)
        return [call.name for call in env.episode.calls if not call.name.startswith("check_")], answer

    assert calls("None")[0] == ["toggle_data", "toggle_data_saver_mode", "run_speed_test"]
    assert calls("Easy")[0] == ["toggle_data", "toggle_data_saver_mode"]
    assert calls("Hard") == ([], "Please give me one step at a time.")


def test_the_seed_decides_when_a_persona_asks_back() -> None:
    def asked(task: Any, seed: int) -> bool:
        user = TelecomUser()
        user.reset(task, seed)
        return "should I" in (user.reply("Please turn off airplane mode.").text or "")

    for persona, rate in (("None", 0.0), ("Easy", 0.1), ("Hard", 0.2)):
        task = tasks.read("telecom", find("mms", persona))
        share = [asked(task, seed) for seed in range(300)]
        assert share == [asked(task, seed) for seed in range(300)]
        assert abs(sum(share) / 300 - rate) <= 0.06


def test_a_question_holds_the_request_back_until_it_is_answered() -> None:
    user = TelecomUser()
    task = tasks.read("telecom", find("mms", "Hard"))
    for seed in range(100):
        user.reset(task, seed)
        answer = user.reply("Please reboot your phone.")
        if answer.text:
            break
    assert answer.text == "Will I lose my photos if I reboot my phone?"
    assert user.reply("The weather is nice.").text == CLARIFICATION
    assert user.reply("No, you will not lose them.").tool_calls == (ToolCall("reboot_device"),)


def test_a_fork_goes_its_own_way() -> None:
    user = TelecomUser()
    user.reset(tasks.read("telecom", find("mms", "None")), 0)
    assert user.reply("Please check your SIM card and your VPN.").tool_calls == (ToolCall("check_sim_status"),)
    twin = user.fork()
    result = (Message("tool", "Your SIM card is active and working."),)
    assert user.observe(result) == twin.observe(result) == UserAction(tool_calls=(ToolCall("check_vpn_status"),))
    user.observe((Message("tool", "VPN is turned OFF."),))
    assert twin.observe((Message("tool", "No VPN."),)).text == "My SIM card is active and working. No VPN."


def test_reports_are_short_and_keep_what_the_tool_says() -> None:
    status = (
        "Airplane Mode: OFF\nSIM Card Status: locked_pin\nCellular Connection: no_service\nCellular Signal: none\n"
        "Cellular Network Type: none\nMobile Data Enabled: Yes\nData Roaming Enabled: No\nWi-Fi Radio: OFF\n"
        "Wi-Fi Connected: No"
    )
    assert report("check_network_status", status) == (
        "Airplane mode: off. SIM: locked pin. Connection: no service. Signal: none. Network: none. Mobile data: on. "
        "Data roaming: off. Wi-Fi: off."
    )
    assert status_bar("Status Bar: 📶¹ Poor | 2G | 📱 Data Enabled | 🔽 Data Saver | 🔋 80%") == (
        "poor signal, 2G, Data Enabled, Data Saver, battery 80%"
    )
    slow = "Speed Test Result: 0.40 Mbps (Very Poor). Connection is very slow. Basic web browsing might be difficult."
    assert report("run_speed_test", slow) == "Speed Test Result: 0.40 Mbps (Very Poor)."
    assert report("check_payment_request", "You have a payment request for bill B1 of 65.0 USD.") == (
        "I have a payment request for bill B1 of 65.0 USD."
    )


PIECES = [
    "turn",
    "off",
    "on",
    "it",
    "if",
    "check",
    "reset",
    "grant",
    "sms",
    "5g",
    "apn",
    "wi-fi",
    "data",
    "?",
    ".",
    ",",
]
NASTY = ["###STOP###", "###TRANSFER###", "\x00\ud83d", "reboot " * 20000, "how much " * 12000]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text(max_size=200) | st.lists(st.sampled_from(PIECES)).map(" ".join) | st.sampled_from(NASTY),
        min_size=1,
        max_size=6,
    )
)
def test_no_text_breaks_the_user(texts: list[str]) -> None:
    user = TelecomUser()
    user.reset(tasks.read("telecom", BASE[0]), 0)
    for text in texts:
        action = user.reply(text)
        for _ in range(20):
            if not action.tool_calls:
                break
            action = user.observe((Message("tool", "Error: broken", error=True),))
        assert action.text and not action.tool_calls
        if action.stop is not None:
            assert action.stop in UserStop
            break


def test_a_reply_takes_a_fraction_of_a_millisecond() -> None:
    user = TelecomUser()
    user.reset(tasks.read("telecom", BASE[0]), 0)
    text = "Please turn off airplane mode and reseat your SIM card."
    best = 1.0
    for _ in range(200):
        twin = user.fork()
        begin = time.perf_counter()
        twin.reply(text)
        best = min(best, time.perf_counter() - begin)
    assert best < 2e-4
