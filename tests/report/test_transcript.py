"""Every message of an episode is in its text, once and in order, with what is trained and what is paid."""

from __future__ import annotations

from dataclasses import replace

from sinkflex.envs.env import Action, Message, StopReason
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.sweep import SweepAgent
from sinkflex.report.transcript import transcript
from sinkflex.rollout.scripted import play
from sinkflex.tasks.suites import scored_tasks
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn

TASKS = [task.task_id for task in scored_tasks("telecom", "test")[:3]]


def episode(task_id: str, solo: bool = False) -> Trajectory:
    """An episode of the scripted expert; each turn has as many ids as its place says."""
    dialogue = play(Tau2Env("telecom", "test", solo=solo, max_turns=60), SweepAgent(0, solo=solo), task_id, seed=0)
    turns = [Turn([1], [2] * i, [-0.5] * i, 0, *exchange) for i, exchange in enumerate(dialogue.exchanges, start=1)]
    info = dialogue.info
    outcome, stop, record = Outcome(info["outcome"]), info["stop_reason"], list(info["record"])
    return Trajectory(
        task_id,
        0,
        turns,
        outcome,
        stop,
        dialogue.reward,
        info["reward_parts"],
        record=record,
        opening=list(dialogue.opening),
    )


def test_all_that_was_said_and_called_is_in_the_text_in_order():
    for solo in (False, True):
        for t in (episode(task_id, solo) for task_id in TASKS):
            text = transcript([Group(t.task_id, [t])])
            place = 0
            ticket = [("user", message) for message in t.opening if solo]  # nobody said it, so that no record has it
            for actor, message in [*ticket, *t.record]:
                for said in [message.content, *(f"calls {call.name}(" for call in message.tool_calls)]:
                    place = text.find(said, place)
                    assert place >= 0, (actor, message)
            calls = sum(len(message.tool_calls) for _, message in t.record)  # but for the agent's last, `done`
            assert text.count("    calls ") == calls + solo and (solo or "the user's tool: " in text)
            assert all(f"agent [{len(turn.action_ids)} tokens]:" in text for turn in t.turns)
            assert f"{t.task_id}, member 0: solved ({t.stop_reason}), reward 1" in text


def test_what_the_agent_was_shown_first_stands_once_and_before_its_first_turn():
    for solo in (False, True):
        t = episode(TASKS[0], solo)
        lessons = Message("system", "Reboot last.")
        text = transcript([Group(t.task_id, [replace(t, opening=[lessons, *t.opening])])])
        before = text.partition("\nagent [")[0]
        assert before.endswith(t.opening[-1].content.rstrip()) and text.count(t.opening[-1].content) == 1
        assert before.index("system: Reboot last.") < before.index("user: ") and ("Hi! How can" in before) != solo
        older = transcript([Group(t.task_id, [replace(t, opening=[])])])  # no file of an earlier version has an opening
        assert older == (transcript([Group(t.task_id, [t])]) if not solo else older)

    asked = [Message("system", "Be brief."), Message("user", "How are whales?"), Message("assistant", "Well?")]
    t = Trajectory("train/1", 0, [], Outcome.INVALID, StopReason.AGENT_STOP, None, opening=asked)
    told = transcript([Group(t.task_id, [t])])
    assert told.endswith("system: Be brief.\nuser: How are whales?\nagent: Well?\n")


def test_what_went_wrong_is_said():
    t = episode(TASKS[0])
    broken = Turn([1], [2], [-0.5], 0, Action(error="no such call"), finish="length", executed=Action(text="Hold on."))
    t = replace(t, turns=[broken, *t.turns], outcome=Outcome.INVALID, reward=None, fault="the server is away")
    text = transcript([Group(t.task_id, [t])])
    for part in ("[1 tokens, cut off]", "cannot be read: no such call", "done instead: Hold on.", "reward none"):
        assert part in text
    assert "fault: the server is away" in text
