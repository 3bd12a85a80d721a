"""Scores against the package's own evaluator: gold replays, damaged gold replays, and what no action is worth."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.database import state_hash
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users.user import UserAction, UserStop

COUNTS = {"telecom": 114, "retail": 114, "airline": 50}


class Puppet:
    """A user that makes the call it is told as JSON, and stops at a goodbye."""

    kind = "replay"

    def reset(self, task: Any, seed: int) -> UserAction:
        return UserAction(text="Hello.")

    def reply(self, text: str) -> UserAction:
        if text.startswith("["):
            return UserAction(tool_calls=(ToolCall(*json.loads(text)),))
        return UserAction(stop=UserStop.STOP) if text == "Goodbye." else UserAction(text="I see.")

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        return UserAction(text=results[0].content or "Done.")

    def fork(self) -> Puppet:
        return self


def replay(env: Tau2Env, task_id: str, drop: int | None = None, say: bool = True) -> tuple[float, dict[str, Any]]:
    """Play a task's gold actions, one of them left out if asked, tell what must be told, and end the episode."""
    env.reset(seed=0, options={"task_id": task_id})
    criteria = env.episode.task.evaluation_criteria
    for i, gold in enumerate(criteria.actions or ()):
        if i == drop:
            continue
        if gold.requestor == "user" and not env.solo:
            env.step(Action(text=json.dumps([gold.name, gold.arguments])))
        else:
            env.step(Action(tool_calls=(ToolCall(gold.name, gold.arguments),)))
    if say and criteria.communicate_info:
        env.step(Action(text=f"Here you are: {'; '.join(criteria.communicate_info)}."))
    goodbye = Action(tool_calls=(ToolCall("done"),)) if env.solo else Action(text="Goodbye.")
    _, reward, terminated, truncated, info = env.step(goodbye)
    assert terminated and not truncated
    return reward, info


def gold_env(domain: str, **options: Any) -> Tau2Env:
    solo = domain in ("retail", "airline")
    return Tau2Env(domain, split="base", solo=solo, user=Puppet, max_turns=100, max_errors=100, **options)


def check_gold(domain: str, task_ids: list[str], package_reward: Any, coerce_arguments: bool) -> None:
    env = gold_env(domain, coerce_arguments=coerce_arguments)
    for task_id in task_ids:
        reward, info = replay(env, task_id)
        assert reward == 1.0, (task_id, info)
        assert package_reward(env) == (reward, info["reward_parts"]), task_id


def some(domain: str, count: int, seed: int = 0) -> list[str]:
    ids = [spec.task_id for spec in tasks.load(domain, "base")]
    return random.Random(seed).sample(ids, count)


@pytest.mark.parametrize("domain", COUNTS)
def test_gold_replay_scores_one_in_every_base_task(domain):
    env = gold_env(domain)
    specs = tasks.load(domain, "base")
    assert len(specs) == COUNTS[domain]
    assert [spec.task_id for spec in specs if replay(env, spec.task_id)[0] != 1.0] == []


def test_solo_gold_replay_scores_one_in_every_telecom_task():
    env = Tau2Env("telecom", split="base", solo=True)
    assert [spec.task_id for spec in tasks.load("telecom", "base") if replay(env, spec.task_id)[0] != 1.0] == []


@pytest.mark.parametrize("domain", COUNTS)
def test_gold_replay_equals_the_packages_evaluator(domain, package_reward):
    check_gold(domain, some(domain, 5), package_reward, coerce_arguments=True)


@pytest.mark.slow
@pytest.mark.parametrize("coerce_arguments", [True, False])
@pytest.mark.parametrize("domain", COUNTS)
def test_every_gold_replay_equals_the_packages_evaluator(domain, coerce_arguments, package_reward):
    check_gold(domain, [spec.task_id for spec in tasks.load(domain, "base")], package_reward, coerce_arguments)


@pytest.mark.parametrize("domain", COUNTS)
def test_damaged_gold_replay_equals_the_packages_evaluator(domain, package_reward):
    env = gold_env(domain)
    rewards = []
    for task_id in some(domain, 3, seed=1):
        gold = tasks.read(domain, task_id).evaluation_criteria.actions or []
        for drop in {0, len(gold) - 1}:
            reward, info = replay(env, task_id, drop=drop, say=False)
            assert package_reward(env) == (reward, info["reward_parts"]), (task_id, drop)
            rewards.append(reward)
    assert 0.0 in rewards


def test_mock_scores_equal_the_packages_evaluator(package_reward):
    env = Tau2Env("mock", split="base", user=Puppet)
    rewards = {}
    for spec in tasks.load("mock", "base"):
        rewards[spec.task_id], info = replay(env, spec.task_id)
        assert package_reward(env) == (rewards[spec.task_id], info["reward_parts"]), spec.task_id
    without_gold_actions = "update_task_with_history_and_env_assertions"
    assert [task_id for task_id, reward in rewards.items() if reward != 1.0] == [without_gold_actions]


def do_nothing(domain: str) -> int:
    env = Tau2Env(domain, split="base", solo=True)
    solved = 0
    for spec in tasks.load(domain, "base"):
        env.reset(options={"task_id": spec.task_id})
        solved += env.step(Action(tool_calls=(ToolCall("done"),)))[1] == 1.0
    return solved


@pytest.mark.parametrize(("domain", "floor"), [("telecom", 0), ("retail", 7), ("airline", 19)])
def test_an_agent_that_does_nothing_is_paid_the_known_floor(domain, floor):
    assert do_nothing(domain) == floor


def test_always_transferring_solves_8_training_and_12_test_tasks_of_telecom():
    env = Tau2Env("telecom", solo=True)
    solved = {}
    for split in ("train", "test"):
        solved[split] = 0
        for spec in tasks.load("telecom", split):
            env.reset(options={"task_id": spec.task_id})
            env.step(Action(tool_calls=(ToolCall("transfer_to_human_agents", {"summary": "x"}),)))
            solved[split] += env.step(Action(tool_calls=(ToolCall("done"),)))[1] == 1.0
    assert solved == {"train": 8, "test": 12}


@pytest.mark.parametrize("domain", [*COUNTS, "mock"])
def test_scoring_changes_nothing(domain):
    env = gold_env(domain)
    for task_id in some(domain, 4):
        env.reset(seed=0, options={"task_id": task_id})
        before = state_hash(env.episode.world)
        assert env.score() == env.score()
        assert state_hash(env.episode.world) == before


def test_communicated_numbers_are_found_as_in_the_package():
    task_id = next(
        spec.task_id
        for spec in tasks.load("retail", "base")
        if tasks.read("retail", spec.task_id).evaluation_criteria.communicate_info
    )
    env = gold_env("retail")
    assert replay(env, task_id, say=True)[1]["reward_parts"]["COMMUNICATE"] == 1.0
    assert replay(env, task_id, say=False)[1]["reward_parts"]["COMMUNICATE"] == 0.0


def test_a_thought_is_not_communicated():
    task_id = next(
        spec.task_id
        for spec in tasks.load("retail", "base")
        if tasks.read("retail", spec.task_id).evaluation_criteria.communicate_info
    )
    env = gold_env("retail")
    env.reset(options={"task_id": task_id})
    told = "; ".join(env.episode.task.evaluation_criteria.communicate_info)
    env.step(Action(text=f"<think>{told}</think>Done."))
    assert env.score().parts["COMMUNICATE"] == 0.0


def test_an_assertion_about_something_that_does_not_exist_fails_the_task():
    env = Tau2Env("mock", split="base", user=Puppet)
    env.reset(options={"task_id": "create_task_1_with_env_assertions"})
    _, reward, terminated, _, info = env.step(Action(text="Goodbye."))
    assert terminated and reward == 0.0
    assert info["reward_parts"] == {"DB": 0.0, "ENV_ASSERTION": 0.0}
