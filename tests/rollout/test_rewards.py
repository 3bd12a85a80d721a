"""Rewards of a method: what hangs, breaks or eats memory costs its own episode, and says why."""

from __future__ import annotations

import asyncio
import importlib
import re
import time
from collections.abc import Mapping
from functools import partial

import pytest

from sinkflex.envs.env import StopReason
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.hooks import Invalid, RewardParts
from sinkflex.rollout.deadline import Nursery
from sinkflex.rollout.rewards import reward
from sinkflex.trajectory import Group, Outcome, Trajectory

EXPECTED = {
    "good": (None, 0.5, ""),
    "unsure": (StopReason.REWARD_FAULT, None, "the judge cannot tell"),
    "broken": (StopReason.REWARD_FAULT, None, "KeyError: 'verdict'"),
    "local": (StopReason.REWARD_FAULT, None, "Local: of this place"),
    "no number": (StopReason.REWARD_FAULT, None, "the reward is nan: return a finite number"),
}
HANGING = {
    "silent": (StopReason.DEADLINE, None, "reward took longer than its deadline"),
    "loops": (StopReason.DEADLINE, None, "reward took longer than its deadline"),
    "hungry": (StopReason.MEMORY, None, "reward took .* GB of memory"),
    "crashes": (StopReason.REWARD_FAULT, None, "reward ended the worker process"),
}


class Judged(GRPO):
    """Its judge goes by the task's name."""

    async def reward(self, trajectory: Trajectory) -> RewardParts | Invalid:
        match trajectory.task_id:
            case "unsure":
                return Invalid("the judge cannot tell")
            case "broken":
                raise KeyError("verdict")
            case "local":

                class Local(Exception):
                    pass

                raise Local("of this place")
            case "no number":
                return RewardParts(float("nan"), {})
            case "silent":
                await asyncio.sleep(600)
            case "loops":
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "hungry":
                kept = b"x" * 900_000_000
                while kept:
                    await asyncio.sleep(0.01)
            case "crashes":
                importlib.import_module("os").abort()
        return RewardParts(0.5, {"judge": 0.5})


def episodes(*names: str) -> Group:
    return Group(
        "task", [Trajectory(name, i, [], Outcome.FAILED, StopReason.USER_STOP, 0.0) for i, name in enumerate(names)]
    )


def require_outcomes(group: Group, expected: Mapping[str, tuple[StopReason | None, float | None, str]]) -> None:
    for t in group.members:
        reason, value, cause = expected[t.task_id]
        assert (t.valid, t.reward) == (reason is None, value)
        if reason is not None:
            assert t.stop_reason is reason and re.match(cause, t.fault or ""), t.fault


def test_in_this_process_what_raises_is_invalid_with_its_cause() -> None:
    group = episodes(*EXPECTED)
    reward([group], Judged({}, 64))
    require_outcomes(group, EXPECTED)
    assert group.members[0].reward_parts == {"judge": 0.5}


@pytest.mark.timeout(240)
def test_in_workers_a_hang_costs_its_deadline_and_no_other_episode() -> None:
    names = [*EXPECTED, *HANGING, "good"]
    with Nursery(partial(importlib.import_module, __name__), memory_bytes=800_000_000) as workers:
        warm = episodes("good")
        reward([warm], Judged({}, 64), workers, 60.0)  # imports take their time
        group, started = episodes(*names), time.monotonic()
        reward([group], Judged({}, 64), workers, 5.0)
        assert time.monotonic() - started < 2 * 5 + 1, "the hangs were not waited for side by side"
        assert not workers._workers
    require_outcomes(group, EXPECTED | HANGING)
    require_outcomes(warm, EXPECTED)


def test_rewards_of_the_environment_start_nothing() -> None:
    with Nursery() as workers:
        group = episodes("good")
        reward([group], GRPO({}, 64), workers, 5.0)
        assert workers._process is None and group.members[0].reward == 0.0
