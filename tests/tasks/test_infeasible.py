"""Infeasible tasks on the real environment: nothing solves them, and saying so without changing anything does."""

from __future__ import annotations

from typing import Any

import pytest

from sinkflex.envs.env import Action, ToolCall
from sinkflex.envs.tau2.database import same_state
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.infeasible import SUFFIX
from sinkflex.envs.tau2.scoring import score
from sinkflex.envs.tau2.tasks import read
from sinkflex.policy.sweep import SweepAgent
from sinkflex.tasks.gold import expert_calls, gold_calls
from sinkflex.tasks.suites import infeasible_tasks, training_tasks

TELECOM = "[mms_issue]bad_network_preference|user_abroad_roaming_disabled_off[PERSONA:None]"
TRANSFER = Action(tool_calls=(ToolCall("transfer_to_human_agents", {"summary": "It cannot be done."}),))


def names(domain: str, split: str = "train") -> list[str]:
    return [task.task_id for task in infeasible_tasks(domain, training_tasks(domain, split))]


def play(env: Tau2Env, *actions: Action) -> tuple[float, dict[str, Any]]:
    """Play actions until the episode ends, closing with small talk."""
    reward, info = 0.0, {}
    for action in [*actions, *[Action(text="You are being transferred to a human agent. Please hold on.")] * 4]:
        _, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    return reward, info


def test_they_are_built_of_the_training_tasks_alone() -> None:
    telecom, retail = names("telecom", "pool"), names("retail")
    assert len(telecom) > 1000 and len(retail) >= 50
    originals = {task.task_id for task in training_tasks("telecom", "pool")}
    assert {name.removesuffix(SUFFIX) for name in telecom} < originals
    assert not [name for name in telecom if "lock_sim" in name or "contract_end" in name]
    assert infeasible_tasks("mock", training_tasks("mock", "base")) == []


@pytest.mark.parametrize("domain", ["telecom", "retail"])
def test_what_solves_the_original_does_not_solve_them(domain: str) -> None:
    for name in names(domain)[:12]:
        env = Tau2Env(domain)
        env.reset(seed=0, options={"task_id": name})
        world, original = env.episode.world, read(domain, name.removesuffix(SUFFIX))
        before = Tau2Env(domain)
        before.reset(seed=0, options={"task_id": name})
        criteria = original.evaluation_criteria
        assert criteria is not None
        for gold in criteria.actions or ():
            try:
                world.make_tool_call(gold.name, requestor=gold.requestor, **gold.arguments)
                world.sync_tools()
            except ValueError:
                assert domain == "retail", "the order's state forbids it"
        if domain == "retail":
            assert same_state(world, before.episode.world), name
        else:
            assert score(domain, original, world, [], []).reward == 0.0, name
        assert env.score().reward == 0.0, "nobody has said that it cannot be done"


@pytest.mark.parametrize("domain", ["telecom", "retail"])
def test_a_transfer_with_unchanged_data_is_success_and_a_change_before_it_is_not(domain: str) -> None:
    name = names(domain)[0] if domain == "retail" else TELECOM + SUFFIX
    env = Tau2Env(domain)
    env.reset(seed=0, options={"task_id": name})
    customer = {"customer_id": "C1001", "line_id": "L1002"}
    reward, info = play(env, TRANSFER)
    assert (reward, info["reward_parts"]) == (1.0, {"DB": 1.0, "REFUSAL": 1.0})
    if domain == "telecom":
        env.reset(seed=0, options={"task_id": name})
        reward, info = play(env, Action(tool_calls=(ToolCall("enable_roaming", customer),)), TRANSFER)
        assert (reward, info["reward_parts"]) == (0.0, {"DB": 0.0, "REFUSAL": 1.0})


def test_a_refusal_in_words_counts_and_giving_up_without_one_does_not() -> None:
    env = Tau2Env("retail")
    for text, wanted in (("Unfortunately that is not possible.", 1.0), ("Have a nice day.", 0.0)):
        env.reset(seed=0, options={"task_id": names("retail")[0]})
        env.step(Action(text=text))
        assert env.score().parts == {"DB": 1.0, "REFUSAL": wanted}


def test_the_expert_that_looks_first_recognizes_a_locked_card() -> None:
    env, agent = Tau2Env("telecom"), SweepAgent()
    solved = []
    seen = [n for n in names("telecom", "pool") if n.startswith("[service_issue]") and "unseat_sim" not in n]
    for name in seen[:4]:
        observation, _ = env.reset(seed=0, options={"task_id": name})
        agent.reset(0)
        messages, done, reward = list(observation), False, 0.0
        while not done:
            observation, reward, terminated, truncated, _ = env.step(agent.act(messages))
            messages += observation
            done = terminated or truncated
        solved.append(reward)
    assert solved == [1.0] * 4


def test_a_customer_keeps_the_wishes_of_the_original_and_gold_has_no_say() -> None:
    env, name = Tau2Env("retail"), names("retail")[0]
    first, _ = env.reset(seed=0, options={"task_id": name})
    second, _ = env.reset(seed=0, options={"task_id": name.removesuffix(SUFFIX)})
    assert first == second and gold_calls("retail", name) == ()
    followed = [expert_calls("telecom", TELECOM + SUFFIX, diagnose) for diagnose in (True, False)]
    assert [[call.name for call in calls][-2:] for calls in followed] == [["transfer_to_human_agents", "done"]] * 2
    with pytest.raises(ValueError, match="no infeasible form"):
        Tau2Env("telecom").reset(options={"task_id": f"[service_issue]lock_sim_card_pin[PERSONA:Hard]{SUFFIX}"})
