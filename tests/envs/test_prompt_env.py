"""Prompts from a file and a reward function as an environment, and recipes that name environments of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sinkflex.build import make_env
from sinkflex.config import Config
from sinkflex.envs.check import check_environment
from sinkflex.envs.env import Action, EnvironmentFault, StopReason, ToolCall, ToolFault
from sinkflex.envs.own import own_environment
from sinkflex.envs.prompts import PromptEnv, schema
from sinkflex.evaluate import about, suite_of
from sinkflex.recipe import load_config, parse_section
from sinkflex.tasks.suites import scored_tasks, training_tasks

LINES: list[dict[str, Any]] = [
    {"prompt": "What is 2 + 3?", "answer": "5", "tags": {"kind": "sum"}},
    {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "6 times 7?"}], "answer": "42"},
]


def multiply(a: int, b: int = 1) -> int:
    """Multiply two numbers.

    Not shown.
    """
    return a * b


def unspeakable() -> object:
    """Return what is no JSON."""
    return object()


def right(answer: str, example: Mapping[str, Any]) -> float:
    return float(answer == example["answer"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n", encoding="utf-8")
    return path


def environment(file: Path, **options: Any) -> PromptEnv:
    return PromptEnv({"train": file}, right, tools=[multiply, unspeakable], **options)


def test_it_conforms(file: Path) -> None:
    check_environment(lambda: PromptEnv({"train": file}, right, tools=[multiply]))


def test_an_answer_in_words_ends_the_episode_and_is_rewarded_without_its_thinking(file: Path) -> None:
    env = environment(file)
    (message,), info = env.reset(options={"task_id": "train/1"})
    assert (message.role, message.content, info["tags"]) == ("user", "What is 2 + 3?", {"kind": "sum"})
    _, reward, terminated, _, info = env.step(Action(text="<think>2 and 3</think> 5 "))
    assert (reward, terminated, info["stop_reason"]) == (1.0, True, StopReason.AGENT_STOP)
    assert info["reward_parts"] == {"reward": 1.0}
    env.reset(options={"task_id": "train/1"})
    assert env.step(Action(text="6"))[1] == 0.0


def test_tools_are_called_and_mistakes_come_back_as_errors(file: Path) -> None:
    env = environment(file, max_turns=5)
    messages, _ = env.reset(options={"task_id": "train/2"})
    assert [m.role for m in messages] == ["system", "user"]
    calls = (
        ToolCall("multiply", {"a": 6, "b": 7}, "1"),
        ToolCall("multiply", {"c": 1}, "2"),
        ToolCall("divide", {}, "3"),
    )
    results, reward, *_ = env.step(Action(tool_calls=calls))
    assert [(m.content, m.error, m.tool_call_id) for m in results[:1]] == [("42", False, "1")]
    assert all(m.error for m in results[1:]) and "multiply" in results[2].content and reward == 0.0
    (error,), *_ = env.step(Action(error="unfinished call"))
    assert error.error
    assert env.step(Action(text="42"))[1:4] == (1.0, True, False)


def test_a_limit_truncates_and_pays_nothing(file: Path) -> None:
    env = environment(file, max_turns=1)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(Action(tool_calls=(ToolCall("multiply", {"a": 1}, "1"),)))
    assert (reward, terminated, truncated, info["stop_reason"]) == (0.0, False, True, StopReason.MAX_TURNS)


def test_a_reward_function_or_a_tool_that_breaks_is_a_fault_and_no_reward_of_0(file: Path) -> None:
    env = PromptEnv({"train": file}, lambda answer, example: 1 / 0, tools=[unspeakable])
    env.reset(seed=0)
    with pytest.raises(ToolFault, match="no JSON"):
        env.step(Action(tool_calls=(ToolCall("unspeakable", {}, "1"),)))
    with pytest.raises(EnvironmentFault, match="ZeroDivisionError"):
        env.step(Action(text="5"))


def test_the_schema_of_a_function() -> None:
    assert schema(multiply)["function"] == {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    }


def test_mistakes_in_a_file_name_the_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        PromptEnv({"train": bad}, right)
    bad.write_text('{"prompt": "x"}\n{"question": "y"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.jsonl line 2: .*expected \{\"prompt\""):
        PromptEnv({"train": bad}, right)
    (empty := tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is empty"):
        PromptEnv({"train": empty}, right)


def test_a_recipe_names_an_environment_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("examples")
    config = parse_section(Config, {"env": {"domain": "own_reward:sums"}}, "recipe")
    assert isinstance(make_env(config), PromptEnv)
    assert [task.task_id for task in training_tasks("own_reward:sums", "train")][:2] == ["train/1", "train/2"]
    assert [task.task_id for task in scored_tasks("own_reward:sums", "test")][:1] == ["test/1"]
    assert about(config) == "environment own_reward:sums, tools full", "nothing of it is tau2's"
    assert (suite_of("own_reward:sums"), suite_of("retail")) == ("own_reward:sums", "tau2/retail")
    with pytest.raises(ValueError, match="holdout: no training on it"):
        training_tasks("own_reward:sums", "test")


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("no_such_module:x", "cannot be imported"),
        ("sinkflex.seeds:no_such_name", "cannot be imported"),
        ("examples.own_environment:Lock", "makes a Lock without solo, tasks"),
    ],
)
def test_an_environment_that_a_recipe_cannot_use_is_refused(domain: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_environment(domain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("env.domain=telcom", 'there is no such domain. Type "telecom"'),
        ("env.max_turns=3", "env.max_turns does nothing with an environment of your own"),
        ("tasks.split=pool", "no such split. Type"),
    ],
)
def test_options_that_do_nothing_there_are_refused(change: str, message: str, tmp_path: Path) -> None:
    (recipe := tmp_path / "own.toml").write_text('[env]\ndomain = "own_reward:sums"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_config(recipe, [change])
