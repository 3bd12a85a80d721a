from __future__ import annotations

import statistics
from collections import defaultdict

import pytest

from sinkflex.envs.env import Message
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.sweep import MAX_WORDS, SweepAgent


def play(agent: SweepAgent, task_id: str, seed: int = 0) -> tuple[float, list[Message]]:
    """Play one task to its end. Return the reward and the conversation as the agent saw it."""
    env = Tau2Env("telecom", "full", solo=agent.solo)
    messages = list(env.reset(seed=seed, options={"task_id": task_id})[0])
    agent.reset(seed)
    while True:
        action = agent.act(messages)
        observation, reward, terminated, truncated, _ = env.step(action)
        messages += [Message("assistant", action.text or "", tool_calls=action.tool_calls), *observation]
        if terminated or truncated:
            return reward, messages


def solved(agent: SweepAgent, split: str) -> int:
    return int(sum(play(agent, spec.task_id, seed)[0] for seed, spec in enumerate(tasks.load("telecom", split))))


def test_the_sweep_solves_the_base_tasks() -> None:
    assert (solved(SweepAgent(), "train"), solved(SweepAgent(), "test")) == (74, 40)


def test_the_sweep_solves_the_base_tasks_alone() -> None:
    assert solved(SweepAgent(solo=True), "base") == 114


def test_the_order_of_remedies_does_not_matter_but_differs() -> None:
    assert solved(SweepAgent(rng_seed=1, shuffle=True), "base") == 114
    task_id = tasks.load("telecom", "train")[0].task_id
    plans = {tuple(m.content for m in play(SweepAgent(shuffle=True), task_id, seed)[1]) for seed in range(8)}
    assert len(plans) >= 6


def test_an_expert_that_does_not_look_solves_the_base_tasks() -> None:
    assert solved(SweepAgent(diagnose=False), "base") == 114


def test_alone_it_flips_a_switch_back_that_stood_right() -> None:
    assert solved(SweepAgent(diagnose=False, solo=True), "test") == 40


def test_what_the_expert_forgets_is_not_asked_for_and_costs_only_the_tasks_that_need_it() -> None:
    agent = SweepAgent(diagnose=False, forget={"toggle_airplane_mode": 1.0})
    for spec in tasks.load("telecom", "test"):
        reward, messages = play(agent, spec.task_id)
        said = " ".join(m.content for m in messages if m.role == "assistant")
        assert "turn off airplane mode" not in said
        hopeless = "lock_sim" in spec.task_id or "contract_end" in spec.task_id
        assert reward == (hopeless or "airplane_mode_on" not in spec.task_id)


def test_an_expert_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no remedy 'toggle_dat' to forget\. Did you mean toggle_data"):
        SweepAgent(forget={"toggle_dat": 0.5})


def test_omissions_make_imperfect_demonstrations() -> None:
    counts = [solved(SweepAgent(omit=omit, shuffle=True), "train") for omit in (0.0, 0.1, 0.3)]
    assert counts[0] == 74 and counts[0] > counts[1] > counts[2] > 8


@pytest.mark.slow
@pytest.mark.parametrize("solo", [False, True])
def test_the_sweep_solves_every_task(solo: bool) -> None:
    assert solved(SweepAgent(solo=solo), "full") == len(tasks.load("telecom", "full"))


def test_equal_seeds_give_equal_conversations() -> None:
    task_id = tasks.load("telecom", "train")[5].task_id
    twins = [play(SweepAgent(7, omit=0.2, shuffle=True), task_id, seed=3) for _ in range(2)]
    assert twins[0] == twins[1]


def test_conversations_are_short() -> None:
    agent, turns, words = SweepAgent(), defaultdict(list), defaultdict(list)
    for seed, spec in enumerate(tasks.load("telecom", "base")):
        _, messages = play(agent, spec.task_id, seed)
        spoken = [m.content for m in messages if m.role == "assistant"]
        assert max(len(text.split()) for text in spoken) <= MAX_WORDS
        turns[spec.tags["family"]].append(len(spoken))
        words[spec.tags["family"]].append(sum(len(m.content.split()) for m in messages if m.role != "tool"))
    for family in turns:
        print(
            f"{family}: turns median {statistics.median(turns[family])} max {max(turns[family])}, "
            f"spoken words median {statistics.median(words[family])} max {max(words[family])}"
        )
        assert statistics.median(turns[family]) <= 14 and max(turns[family]) <= 26
        assert statistics.median(words[family]) <= 280
