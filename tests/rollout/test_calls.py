from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.rollout.group import Phase, rollout
from sinkflex.trajectory import Group, Outcome
from tests.policy.tiny_policy import TOOLS, tiny_policy

TURNS = 3


class Talk:
    """Says something for a few turns; breaks in its second one where the task is called "broken"."""

    waits = False

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self.task_id, self.turns = options["task_id"], 0
        return (Message("user", f"Hi, I am {self.task_id}."),), {"user": "endpoint"}

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.turns += 1
        if self.task_id == "broken" and self.turns == 2:
            raise EnvironmentFault("the server is down")
        if self.task_id == "wrong":
            raise ZeroDivisionError("a bug")
        ended = self.turns == TURNS
        return (Message("user", "Go on."),), float(ended), ended, False, {"stop_reason": StopReason.USER_STOP}

    def close(self) -> None:
        pass


class Slow(Talk):
    """The same behind a server, which answers the later the more was asked of it before."""

    waits = True
    calls = 0

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        Slow.calls += 1
        time.sleep(0.02 * (Slow.calls % 3))
        return super().step(action)


def play(make: Any, tasks: list[str], in_order: bool = True, slots: int = 4, retries: int = 0) -> list[Group]:
    policy = tiny_policy()
    sampler = Sampler(policy.model, [1], slots=slots, max_tokens=400, max_turn_tokens=3)
    chat, phase = Chat(policy.tokenizer, "", TOOLS), Phase("train", 0, 0, 0, temperature=1.0)
    return rollout(tasks, 2, make, chat, sampler, phase, retries=retries, in_order=in_order)[0]


def told(groups: list[Group]) -> list[Any]:
    return [(t.outcome, t.fault, [turn.action_ids for turn in t.turns]) for group in groups for t in group.members]


TASKS = ["a", "broken", "b", "c"]


@pytest.mark.parametrize("retries", [0, 1])
def test_episodes_behind_a_server_end_as_others_do(retries: int) -> None:
    plain = play(Talk, TASKS, retries=retries)
    ordered = [play(Slow, TASKS, retries=retries) for _ in range(2)]
    assert told(plain) == told(ordered[0]) == told(play(Slow, TASKS, in_order=False, retries=retries))
    bits, again = (
        [[turn.behavior_logprobs for turn in t.turns] for group in groups for t in group.members] for groups in ordered
    )
    assert bits == again, "in order, what is computed together does not depend on when a server answers"
    assert [[t.outcome for t in group.members] for group in plain] == [
        [Outcome.INVALID if task == "broken" else Outcome.SOLVED] * 2 for task in TASKS
    ]


def test_servers_are_asked_at_the_same_time() -> None:
    all_at_once = threading.Barrier(4, timeout=20)

    class Together(Talk):
        waits = True

        def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
            all_at_once.wait()
            return super().step(action)

    groups = play(Together, ["a", "b"])
    assert all(t.outcome is Outcome.SOLVED for group in groups for t in group.members)


def test_out_of_order_an_episode_waits_for_no_other() -> None:
    others_are_done = threading.Event()
    ended = []

    class Late(Talk):
        waits = True

        def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
            if self.task_id == "late" and self.turns == 0:
                assert others_are_done.wait(20), "it was waited for"
            found = super().step(action)
            if self.task_id == "quick" and found[2]:
                ended.append(1)
                if len(ended) == 2:
                    others_are_done.set()
            return found

    groups = play(Late, ["late", "quick"], in_order=False)
    assert all(t.outcome is Outcome.SOLVED for group in groups for t in group.members)


@pytest.mark.parametrize("make", [Talk, Slow])
def test_a_bug_of_an_environment_ends_the_rollout_and_leaves_no_thread(make: Any) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        play(make, ["a", "wrong"])
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("environment") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("waits", [False, True])
def test_an_environment_whose_iterator_runs_out_is_named_as_the_cause(waits: bool) -> None:
    class Short(Talk):
        def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
            return next(iter(()))

    Short.waits = waits
    with pytest.raises(RuntimeError, match="an environment raised StopIteration"):
        play(Short, ["a"])


def test_a_process_ends_without_waiting_for_a_server() -> None:
    program = (
        "import threading\nfrom sinkflex.rollout.calls import Calls\n"
        "def steps():\n    yield lambda: threading.Event().wait(60)\n"
        "Calls().start(0, steps(), waits=True)\n"
    )
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - started < 40
