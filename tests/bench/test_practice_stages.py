"""How far a policy came with practice customers: counted from what it called and what the customer got."""

from __future__ import annotations

from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2 import practice as tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.clerk import ClerkAgent
from sinkflex.rollout.scripted import Dialogue, play
from sinkflex.trajectory import Outcome, Trajectory, Turn
from tests.methods.test_comparison import script

practice = script("practice")


def episode(dialogue: Dialogue, turns: int | None = None) -> Trajectory:
    steps = [Turn([], [], [], 0, action, tuple(seen)) for action, seen in dialogue.exchanges[:turns]]
    reward = dialogue.reward if turns is None else 0.0
    return Trajectory(dialogue.task_id, 0, steps, Outcome.FAILED, StopReason.USER_STOP, reward)


def test_an_episode_counts_for_all_that_was_reached_and_no_more() -> None:
    served = [play(Tau2Env("retail"), ClerkAgent(), tasks.name(practice.SEED, number), 0) for number in range(12)]
    happy = [dialogue for dialogue in served if dialogue.reward == 1.0]
    assert len(happy) >= 8
    for dialogue in happy:
        assert practice.stages(episode(dialogue)) == list(practice.STAGES)
        assert practice.stages(episode(dialogue, 1)) == ["customers"], "so far the clerk has only asked"
    of_orders = [
        dialogue
        for dialogue in happy
        if any("get_order" in c.name for a, _ in dialogue.exchanges for c in a.tool_calls)
    ]
    for dialogue in of_orders:
        opened = next(
            i for i, (a, _) in enumerate(dialogue.exchanges) if any("get_order" in c.name for c in a.tool_calls)
        )
        assert practice.stages(episode(dialogue, opened)) == ["customers", "recognized"]
        assert practice.stages(episode(dialogue, opened + 1)) == ["customers", "recognized", "order opened"]


def test_the_table_counts_each_wish_and_all() -> None:
    dialogue = play(Tau2Env("retail"), ClerkAgent(), tasks.name(practice.SEED, 0), 0)
    lines = practice.table([episode(dialogue), episode(dialogue, 1)]).splitlines()
    assert lines[0] == "| wish | customers | recognized | order opened | satisfied |"
    assert lines[2].startswith("| all | 2 | 1 | 1 |") and len(lines) == 4
