"""The examples run as they are, stay short, and do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import own_reward
from examples.own_environment import Lock
from examples.own_method import LeaveOneOut
from examples.own_user import caller_on_a_bad_line
from sinkflex.envs.check import check_environment
from sinkflex.envs.env import Action, StopReason, ToolCall
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.methods.method import Method, build_method
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn

EXAMPLES = sorted(Path("examples").glob("*.py"))
LINES = 80


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python puts the folder of a script on the path."""
    monkeypatch.syspath_prepend("examples")


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= LINES
    assert f"    python {path}\n" in text


def test_a_tiny_policy_plays_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("own_environment", capsys) == f"{ {task: ['max_turns'] * 4 for task in ('9', '99')} }\n"


def test_the_environment_pays_for_the_secret_number() -> None:
    env = Lock()
    env.reset(seed=3, options={"task_id": "99"})
    low, high = 0, 99
    for _ in range(7):
        number = (low + high) // 2
        call = ToolCall("guess", {"number": number}, "c")
        (message,), reward, terminated, _, info = env.step(Action(tool_calls=(call,)))
        low, high = (number + 1, high) if message.content == "higher" else (low, number - 1)
        if terminated:
            break
    assert (reward, info["stop_reason"], number) == (1.0, StopReason.AGENT_STOP, env.secret)


def test_a_method_outside_the_package_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("own_method", capsys).startswith("LeaveOneOut after step 1\n")


def group(rewards: list[float | None]) -> Group:
    turn = Turn([1], [2, 3], [0.0, 0.0], 0, Action(text="x"))
    of = {None: Outcome.INVALID, 1.0: Outcome.SOLVED}
    members = [
        Trajectory("t", i, [turn], of.get(reward, Outcome.FAILED), StopReason.USER_STOP, reward)
        for i, reward in enumerate(rewards)
    ]
    return Group("t", members)


def advantages(method: Method, rewards: list[float | None]) -> list[list[float]]:
    return [values.tolist() for values in method.advantages(group(rewards))]


def test_leave_one_out_by_hand() -> None:
    method = LeaveOneOut({}, max_tokens=1)
    np.testing.assert_allclose(advantages(method, [1.0, 0.0, 0.0]), [[1.0] * 2, [-0.5] * 2, [-0.5] * 2])
    np.testing.assert_allclose(advantages(method, [1.0, None, 0.0]), [[1.0] * 2, [-1.0] * 2])
    assert advantages(method, [1.0]) == [[0.0] * 2] and advantages(method, [None]) == []


def test_leave_one_out_is_g_over_g_minus_1_times_the_centered_reward() -> None:
    ours = LeaveOneOut({}, max_tokens=1)
    centered = build_method("grpo", {"advantage_scale": "none"}, max_tokens=1)
    rewards: list[Any] = [0.3, 0.9, 0.1, 0.4]
    np.testing.assert_allclose(advantages(ours, rewards), 4 / 3 * np.array(advantages(centered, rewards)), rtol=1e-6)


def test_prompts_and_a_reward_function_train(capsys: pytest.CaptureFixture[str]) -> None:
    own_reward.main("run.threads=1", "train.steps=2")
    assert re.fullmatch(r"mean reward: 0\.\d\d in step 1, 0\.\d\d in step 2\n", capsys.readouterr().out)


def test_a_bad_line_costs_the_expert_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    clear, bad = run("own_user", capsys).splitlines()
    assert clear == "scripted: the expert solves 40 of 40 test tasks"
    kind, _, result = bad.partition(": the expert solves ")
    assert kind == "scripted on a bad line" and 0 < int(result.split()[0]) < 40


def test_an_environment_with_the_user_conforms() -> None:
    check_environment(lambda: Tau2Env("telecom", user=caller_on_a_bad_line))
