"""Whole rollouts with users that break: what broke is invalid and listed, everything else goes on."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Served, hangs, raw, says, send, serving, trickles

from sinkflex.envs.env import Action, StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.rollout.episode import Episode
from sinkflex.rollout.group import Phase, rollout
from sinkflex.scores import compare, summarize
from sinkflex.trajectory import Group, Outcome, read_trajectories, write_trajectories
from sinkflex.users.chat_server import ChatServer
from sinkflex.users.endpoint import EndpointUser
from tests.policy.tiny_policy import TOOLS, tiny_policy

TASKS = [spec.task_id for spec in tasks.load("mock", "base")]
# One task for each scenario, none with a history.
PLAIN = list(
    {str(t.user_scenario): t.id for t in (tasks.read("mock", id) for id in TASKS) if not t.initial_state}.values()
)


def rolled_out(
    url: str, task_ids: list[str], size: int = 2, on_episode: Any = None, max_tokens: int = 600, **server: Any
) -> list[Group]:
    """Roll out a random policy with a user behind a server."""
    quick = {"timeout_seconds": 2.0, "attempts": 1, "backoff_seconds": 0.0, **server}
    user = EndpointUser(ChatServer(url, "m", **quick))
    policy = tiny_policy()
    chat = Chat(policy.tokenizer, "", TOOLS)
    sampler = Sampler(policy.model, [1], slots=3, max_tokens=max_tokens, max_turn_tokens=4)
    phase = Phase("evaluation", 0, 0, 0, temperature=1.0, trials=True)

    def make_env() -> Tau2Env:
        return Tau2Env("mock", "base", user=user, max_turns=4)

    return rollout(task_ids, size, make_env, chat, sampler, phase, on_episode)[0]


def episodes(groups: list[Group]) -> list[Any]:
    return [t for group in groups for t in group.members]


def test_a_server_killed_in_mid_run_costs_no_score_and_the_run_goes_on_when_it_returns(tmp_path: Path) -> None:
    server = Served([says("Hello.")])
    ended: list[Any] = []

    def on_episode(episode: Episode) -> None:
        """Kill the server after four episodes; start it again, on the same port, after three that failed."""
        nonlocal server
        ended.append(episode.trajectory)
        broken = sum(not t.valid for t in ended)
        if len(ended) == 4:
            server.stop()
        elif broken == 3 and not ended[-1].valid:
            server = Served([says("I am back.")], port=server.port)

    try:
        groups = rolled_out(server.url, PLAIN * 3, on_episode=on_episode)
    finally:
        server.stop()
    all_of_them = episodes(groups)
    invalid, valid = ([t for t in all_of_them if t.valid is kind] for kind in (False, True))
    assert 3 <= len(invalid) <= 6, "the failed one and those that ran beside it"
    assert [(t.reward, t.outcome, t.stop_reason) for t in invalid] == [
        (None, Outcome.INVALID, StopReason.USER_FAULT)
    ] * len(invalid)
    assert all(t.reward is not None for t in valid) and {t.user for t in all_of_them} == {"endpoint"}
    assert server.requests and sum("I am back." in str(t.record) for t in valid) > len(invalid)
    score = summarize(groups)
    assert sum(score["invalid"].values()) == len(invalid)
    assert all(f"Type curl {server.url}/models" in cause for cause in score["invalid"])
    assert sum(entry["episodes"] for entry in score["by_stop_reason"].values()) == len(valid)
    path = tmp_path / "t.jsonl.zst"
    write_trajectories(path, groups)
    assert summarize(read_trajectories(path)) == score
    whole = [Group(g.task_id, g.valid) for g in groups if g.valid]
    assert summarize(whole)["mean@1"] == score["mean@1"] and compare(groups, whole)["difference"] == 0.0


def test_a_server_that_returns_while_it_is_asked_again_costs_nothing() -> None:
    server, killed = Served([says("Hello.")]), False

    def on_episode(episode: Episode) -> None:
        nonlocal server, killed
        if not killed:
            killed = True
            server.stop()

            def revive() -> None:
                nonlocal server
                server = Served([says("I am back.")], port=server.port)

            threading.Timer(0.3, revive).start()

    try:
        groups = rolled_out(server.url, PLAIN[:2], on_episode=on_episode, attempts=60, backoff_seconds=0.05)
    finally:
        server.stop()
    assert killed and all(t.valid for t in episodes(groups)) and "I am back." in str(groups)


BROKEN = {
    "garbage": raw(b"<html>\xff"),
    "nothing": says(""),
    "goodbye at once": says("###STOP###"),
    "hangs": hangs,
    "trickles": trickles,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_that_misbehaves_on_one_task_breaks_that_task_alone(name: str) -> None:
    unlucky, *others = PLAIN[:3]
    scenario = str(tasks.read("mock", unlucky).user_scenario)

    def respond(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        (BROKEN[name] if scenario in body["messages"][0]["content"] else says("Hello."))(handler, body)

    begin = time.monotonic()
    with serving(respond) as server:
        groups = rolled_out(server.url, [unlucky, *others], timeout_seconds=1.0)
    assert time.monotonic() - begin < 30
    bad, *good = groups
    assert [(t.outcome, t.reward, t.user, len(t.turns)) for t in bad.members] == [
        (Outcome.INVALID, None, "endpoint", 0)
    ] * 2
    assert all(t.valid for t in episodes(good))
    score = summarize(groups)
    assert score["unscored"] == [unlucky] and sum(score["invalid"].values()) == 2


def test_a_server_that_fails_late_leaves_what_was_said_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "parse", lambda *_: Action(text="What can I do for you?"))
    script = [says("Hello."), says("Go on."), raw(b"x")]
    with serving(*script) as server:
        groups = rolled_out(server.url, PLAIN[:1], size=1)
    (t,) = groups[0].members
    assert t.outcome is Outcome.INVALID and t.turns and t.reward is None
    question = "What can I do for you?"
    assert [message.content for _, message in t.record][1:] == ["Hello.", question, "Go on.", question]
    assert t.domain == "mock" and len(t.turns) == 2


def test_an_episode_that_runs_out_of_tokens_still_says_what_it_had_reached() -> None:
    with serving(says("word " * 30)) as server:
        groups = rolled_out(server.url, PLAIN[:2], max_tokens=250)
    cut = [t for t in episodes(groups) if t.stop_reason is StopReason.MAX_TOKENS]
    assert cut and all(t.outcome is Outcome.TRUNCATED and t.reward == 0.0 for t in cut)
    for t in cut:
        basis = {part.value for part in tasks.read("mock", t.task_id).evaluation_criteria.reward_basis}
        assert t.reward_parts and set(t.reward_parts) <= basis and t.record


def test_what_the_agent_writes_as_a_stop_token_never_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chat, "parse", lambda *_: Action(text="Bye ###STOP### now ###TRANSFER###"))
    with serving(says("Who are you?")) as server:
        groups = rolled_out(server.url, PLAIN[:1], size=1)
    (t,) = groups[0].members
    assert t.stop_reason is StopReason.MAX_TURNS and t.reward == 0.0
    heard = [m["content"] for *_, body in server.requests for m in body["messages"][1:] if m["role"] == "user"]
    assert "Bye  now" in heard and not any("###" in text for text in heard)


def test_slow_answers_are_no_faults() -> None:
    def slow(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        time.sleep(0.02)
        send(handler, b'{"choices": [{"message": {"content": "Yes."}}]}')

    with serving(slow) as server:
        groups = rolled_out(server.url, PLAIN[:1])
    assert all(t.valid for t in episodes(groups))
