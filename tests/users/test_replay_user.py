"""A recorded user plays its part again, in every domain and with its tools."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from interviewing import interviewed

from sinkflex.envs.env import Action, EnvironmentFault, StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.database import state_hash
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users.replay import ReplayUser, recorded_actions
from sinkflex.users.telecom_phrases import verbalize
from sinkflex.users.user import UserAction, UserStop


def replayed(env: Tau2Env) -> Tau2Env:
    """Play an ended episode again: the agent's side as it was, the user's from the recording."""
    again = Tau2Env(env.domain, "base", max_turns=200, max_errors=50)
    user = ReplayUser(recorded_actions(env.episode.record, env.episode.stop_reason))
    _, info = again.reset(seed=9, options={"task_id": env.episode.spec.task_id, "user": user})
    assert info["user"] == "replay"
    for actor, message in env.episode.record[1:]:  # after the greeting
        if actor == message.role == "assistant":
            calls = message.tool_calls
            again.step(Action(tool_calls=calls) if calls else Action(text=message.content))
    return again


@pytest.mark.parametrize(
    ("domain", "task_id"), [("retail", "5"), ("retail", "76"), ("airline", "23"), ("airline", "0")]
)
def test_a_recorded_conversation_plays_the_same_again(domain: str, task_id: str) -> None:
    env = interviewed(domain, task_id).env
    again = replayed(env)
    assert again.episode.record == env.episode.record
    assert again.episode.stop_reason is StopReason.USER_STOP and again.score() == env.score()


def test_the_users_own_calls_are_played_again() -> None:
    plain = [spec.task_id for spec in tasks.load("telecom", "base") if spec.tags["persona"] == "None"]
    golds = {task_id: tasks.read("telecom", task_id).evaluation_criteria.actions for task_id in plain}
    task_id = next(id for id, gold in golds.items() if len(gold) > 2 and all(a.requestor == "user" for a in gold))
    env = Tau2Env("telecom", "base")
    env.reset(seed=0, options={"task_id": task_id})
    for gold in golds[task_id]:
        if env.episode.stop_reason is None:
            env.step(Action(text=verbalize(gold.name, gold.arguments)))
    again = replayed(env)
    assert state_hash(again.episode.world) == state_hash(env.episode.world) and again.score().reward == 1.0
    assert [call.name for call in again.episode.calls] == [call.name for call in env.episode.calls]


def test_an_agent_that_goes_beyond_the_recording_meets_a_fault() -> None:
    env = Tau2Env("retail", "base", user=ReplayUser([UserAction("Hello."), UserAction("Yes.")]))
    env.reset(seed=0, options={"task_id": "0"})
    env.step(Action(text="Really?"))
    with pytest.raises(EnvironmentFault, match="ends after 2 actions"):
        env.step(Action(text="And now?"))
    env.reset(seed=0, options={"task_id": "0"})
    assert env.step(Action(text="Really?"))[0][0].content == "Yes."


def test_a_stop_is_recorded_with_the_last_words_or_without_any() -> None:
    def end(last: UserAction) -> list[UserAction]:
        env = Tau2Env("retail", "base", user=ReplayUser([UserAction("Hello."), last]))
        env.reset(seed=0, options={"task_id": "0"})
        *_, info = env.step(Action(text="Bye."))
        return recorded_actions(env.episode.record, info["stop_reason"])

    for last in (UserAction("Bye.", stop=UserStop.STOP), UserAction(stop=UserStop.TRANSFER), UserAction("Hm.")):
        assert end(last) == [UserAction("Hello."), last]


def test_forks_and_pickles_go_their_own_way() -> None:
    user: Any = ReplayUser([UserAction("A"), UserAction("B"), UserAction("C")])
    assert user.reset(None, 0).text == "A"
    twin, stored = user.fork(), pickle.loads(pickle.dumps(user))
    assert [user.reply("").text, user.observe(()).text] == ["B", "C"]
    assert twin.reply("").text == stored.reply("").text == "B"
