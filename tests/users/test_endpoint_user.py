"""The user behind an OpenAI-compatible server: a real server on this machine, with the faults that servers have."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import tau2.user
from scripted_server import calls, cut_off, elapsed, hangs, hangs_up, raw, says, serving, trickles

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.actions import user_tools
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.policies import GREETING
from sinkflex.users.chat_server import MAX_BYTES, ChatServer
from sinkflex.users.endpoint import EndpointUser, system_text
from sinkflex.users.user import UserAction, UserStop

SLOW_DATA = "[mobile_data_issue]data_saver_mode_on[PERSONA:Easy]"
RETAIL = tasks.read("retail", "0")


def user_of(url: str, parameters: dict[str, Any] | None = None, **options: Any) -> EndpointUser:
    quick = {"timeout_seconds": 5.0, "attempts": 2, "backoff_seconds": 0.0, **options}
    return EndpointUser(ChatServer(url, "tiny", **quick), parameters)


def test_the_request_is_tau2s_own_simulator_prompt_with_roles_swapped() -> None:
    with serving(says("Hi, I want an exchange."), says("I am Yusuf Rossi.")) as server:
        user = user_of(server.url, {"max_tokens": 99}, api_key="secret")
        assert user.reset(RETAIL, 5) == UserAction("Hi, I want an exchange.")
        assert user.reply("Who are you?") == UserAction("I am Yusuf Rossi.")
    (path, headers, first), (_, _, second) = server.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert first == {
        "model": "tiny",
        "messages": [{"role": "system", "content": system_text(RETAIL, False)}, {"role": "user", "content": GREETING}],
        "seed": 5,
        "temperature": 0.0,
        "max_tokens": 99,
    }
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Hi, I want an exchange."},
        {"role": "user", "content": "Who are you?"},
    ]


@pytest.mark.parametrize("domain", ["retail", "telecom", "mock"])
def test_the_system_text_equals_the_packages(domain: str) -> None:
    folder = Path(tau2.user.__file__).parent
    tree = ast.parse((folder / "user_simulator.py").read_text("utf-8"))
    template = next(
        ast.literal_eval(node.value.func.value).strip()  # SYSTEM_PROMPT = """...""".strip()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SYSTEM_PROMPT"
    )
    tools = domain == "telecom"
    name = "simulation_guidelines_tools.md" if tools else "simulation_guidelines.md"
    guidelines = (folder.parent / "data" / "tau2" / "user_simulator" / name).read_text("utf-8")
    task = tasks.read(domain, tasks.load(domain, "base")[0].task_id)
    assert system_text(task, tools) == template.format(
        global_user_sim_guidelines=guidelines, instructions=str(task.user_scenario)
    )


@pytest.mark.parametrize(
    ("content", "action"),
    [
        ("Thanks! ###STOP###", UserAction("Thanks!", stop=UserStop.STOP)),
        ("###TRANSFER###", UserAction(stop=UserStop.TRANSFER)),
        ("Hm. ###OUT-OF-SCOPE### ###STOP###", UserAction("Hm.", stop=UserStop.OUT_OF_SCOPE)),
        ("<think>Should I stop? ###STOP###</think>Not yet.", UserAction("Not yet.")),
        ("  Zażółć \U0001f600  ", UserAction("Zażółć \U0001f600")),
    ],
)
def test_stop_tokens_end_the_conversation_and_thinking_is_not_heard(content: str, action: UserAction) -> None:
    with serving(says("Hello."), says(content)) as server:
        user = user_of(server.url)
        user.reset(RETAIL, 0)
        assert user.reply("And now?") == action


def test_in_telecom_the_model_uses_the_users_tools() -> None:
    script = (
        says("My data is slow."),
        calls(("toggle_data_saver_mode", "{}"), ("run_speed_test", {}), content="Let me see."),
        says("It is excellent now. ###STOP###"),
    )
    with serving(*script) as server:
        env = Tau2Env("telecom", "small", user=user_of(server.url))
        env.reset(seed=0, options={"task_id": SLOW_DATA})
        observation, reward, *_, info = env.step(Action(text="Please turn off data saver."))
    assert observation == (Message("user", "It is excellent now."),)
    assert reward == 1.0 and info["stop_reason"] is StopReason.USER_STOP
    bodies = [body for *_, body in server.requests]
    assert bodies[0]["tools"] == json.loads(json.dumps(user_tools("telecom")))
    made, first, second = bodies[2]["messages"][-3:]
    assert [call["id"] for call in made["tool_calls"]] == ["c0", "c1"] and made["content"] == "Let me see."
    assert (first["tool_call_id"], second["tool_call_id"]) == ("c0", "c1") and "OFF" in first["content"]


def test_calls_without_ids_get_ids_that_pair_them_with_their_results() -> None:
    two = calls(("run_speed_test", ""), ("check_sim_status", "{}"), ids=False)
    with serving(says("Hello."), two, says("Fast.")) as server:
        user = user_of(server.url)
        user.reset(tasks.read("telecom", SLOW_DATA), 0)
        made = user.reply("Run a speed test.").tool_calls
        assert [call.name for call in made] == ["run_speed_test", "check_sim_status"] and made[0].id != made[1].id
        user.observe(tuple(Message("tool", "ok", tool_call_id=call.id) for call in made))
    asked, *results = server.requests[-1][-1]["messages"][-3:]
    assert [call["id"] for call in asked["tool_calls"]] == [result["tool_call_id"] for result in results]


# --- Faults ----------------------------------------------------------------------------------------------------

BROKEN = {
    "no JSON": raw(b"<html>Bad gateway</html>"),
    "no choices": raw(b'{"choices": []}'),
    "a list": raw(b"[1, 2]"),
    "nested without end": raw(b"[" * 100_000),
    "no message": raw(b'{"choices": [{"message": 7}]}'),
    "bytes": raw(b"\xff\xfe\x00"),
    "nothing": raw(b""),
    "an empty message": says(""),
    "only thinking": says("<think>hm"),
    "content of another type": says([1]),
    "calls without tools": calls(("get_order_details", "{}")),
    "calls that cannot be read": says("x", tool_calls=[{"name": "f"}]),
    "too much": raw(b"x" * (MAX_BYTES + 1)),
    "a status": raw(b"overloaded", 503),
    "busy": raw(b"slow down", 429),
    "hangs up": hangs_up,
    "cut off": cut_off,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_fails_once_is_asked_again(name: str) -> None:
    with serving(BROKEN[name], says("Hello.")) as server:
        assert user_of(server.url).reset(RETAIL, 0) == UserAction("Hello.")
    assert len(server.requests) == 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_always_fails_is_a_fault_and_not_a_score(name: str) -> None:
    with serving(says("Hello."), BROKEN[name]) as server:
        env = Tau2Env("retail", "base", user=user_of(server.url))
        env.reset(seed=0, options={"task_id": "0"})
        with pytest.raises(EnvironmentFault, match="no usable answer in 2 attempts"):
            env.step(Action(text="Who are you?"))
    assert env.episode.stop_reason is StopReason.FAULT and len(server.requests) == 3


@pytest.mark.parametrize("fault", [hangs, trickles])
def test_a_server_that_does_not_come_to_an_end_is_cut_off(fault: Any) -> None:
    with serving(fault) as server:
        user = user_of(server.url, timeout_seconds=0.3, attempts=2)
        assert 0.55 <= elapsed(lambda: user.reset(RETAIL, 0)) <= 5.0
        with pytest.raises(EnvironmentFault, match=r"2 attempts of 0\.3 seconds"):
            user.reset(RETAIL, 0)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_repeated(status: int) -> None:
    words = rf"refuses model 'tiny': status {status} .*no such model"
    with serving(raw(b'{"error": "no such model"}', status)) as server, pytest.raises(EnvironmentFault, match=words):
        user_of(server.url, attempts=5, api_key="secret").reset(RETAIL, 0)
    assert len(server.requests) == 1


def test_no_server_is_a_fault_that_says_where_it_should_be() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    user = user_of(f"http://127.0.0.1:{port}/v1", api_key="secret")
    with pytest.raises(EnvironmentFault, match=rf"127.0.0.1:{port}/v1/models") as error:
        user.reset(RETAIL, 0)
    assert "secret" not in f"{error.value} {user.server!r}"


def test_waits_double_and_obey_the_server() -> None:
    broken = raw(b"", 503)
    with serving(broken) as server:
        assert 0.3 <= elapsed(lambda: user_of(server.url, attempts=3, backoff_seconds=0.1).reset(RETAIL, 0)) <= 3.0
    with serving(raw(b"", 429, Retry_After="0.4"), says("Hello.")) as server:
        assert 0.4 <= elapsed(lambda: user_of(server.url).reset(RETAIL, 0)) <= 3.0


def test_a_server_killed_between_turns_makes_the_episode_invalid_and_the_next_one_goes_on_when_it_returns() -> None:
    with serving(says("Hello.")) as server:
        env = Tau2Env("retail", "base", user=user_of(server.url))
        env.reset(seed=0, options={"task_id": "0"})
        env.step(Action(text="Who are you?"))
    with pytest.raises(EnvironmentFault):
        env.step(Action(text="Which order?"))
    with pytest.raises(EnvironmentFault):
        env.reset(seed=1, options={"task_id": "0"})
    with serving(says("I am back."), port=server.port):
        observation, info = env.reset(seed=1, options={"task_id": "0"})
    assert observation == (Message("user", "I am back."),) and info["user"] == "endpoint"


def test_a_server_that_returns_during_the_retries_saves_the_episode() -> None:
    with serving(says("Hello.")) as server:
        user = user_of(server.url, attempts=40, backoff_seconds=0.05)
        user.reset(RETAIL, 0)
    revived: list[Any] = []

    def revive() -> None:
        with serving(says("Still here."), port=server.port):
            done.wait(20)
        revived.append(True)

    done = threading.Event()
    later = threading.Timer(0.3, revive)
    later.start()
    try:
        assert user.reply("Hello?") == UserAction("Still here.")
    finally:
        done.set()
        later.join()
    assert revived


def test_a_failed_request_leaves_the_conversation_as_it_was() -> None:
    with serving(says("Hello."), raw(b""), raw(b""), says("Yes.")) as server:
        user = user_of(server.url)
        user.reset(RETAIL, 0)
        with pytest.raises(EnvironmentFault):
            user.reply("One?")
        assert user.reply("Two?") == UserAction("Yes.")
    assert [m["content"] for m in server.requests[-1][-1]["messages"][2:]] == ["Hello.", "Two?"]


def test_no_thread_or_socket_is_left_behind() -> None:
    with serving(says("Hello."), hangs_up, cut_off, says("Hello.")) as server:
        user = user_of(server.url, attempts=4)
        before = threading.active_count()
        for _ in range(5):
            user.reset(RETAIL, 0)
    assert threading.active_count() <= before  # and unclosed sockets are errors in this suite


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:8000"}, "http://localhost:8000/v1"),
        ({"url": "http://key@host/v1"}, "http://localhost:8000/v1"),
        ({"model": ""}, "/models"),
        ({"attempts": 0}, "attempts = 0"),
        ({"timeout_seconds": 0}, "timeout_seconds = 0"),
    ],
)
def test_a_mistaken_server_is_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatServer(**{"url": "http://localhost/v1", "model": "tiny", **options})


def test_forks_and_pickles_go_their_own_way() -> None:
    with serving(says("Hello."), says("One."), says("Two."), says("Three.")) as server:
        user = user_of(server.url)
        user.reset(RETAIL, 0)
        twin, stored = user.fork(), pickle.loads(pickle.dumps(user))
        assert [who.reply("?").text for who in (user, twin, stored)] == ["One.", "Two.", "Three."]
        assert copy.copy(twin).reply("And?").text == "Three."
    assert [len(body["messages"]) for *_, body in server.requests] == [2, 4, 4, 4, 6]


def test_a_tool_call_the_user_does_not_have_comes_back_to_it_as_an_error() -> None:
    with serving(says("Hello."), calls(("fly_to_the_moon", "{}")), says("I cannot.")) as server:
        env = Tau2Env("telecom", "small", user=user_of(server.url))
        env.reset(seed=0, options={"task_id": SLOW_DATA})
        observation, *_ = env.step(Action(text="Fly to the moon."))
    assert observation == (Message("user", "I cannot."),)
    assert "not found" in server.requests[-1][-1]["messages"][-1]["content"]
    assert env.episode.calls == [ToolCall("fly_to_the_moon", {}, "c0")]
