"""Rewards that a method gives after an episode, by a program or by judges: all at once, or each with a deadline."""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sinkflex.envs.env import StopReason
from sinkflex.methods.hooks import Invalid, RewardParts
from sinkflex.methods.method import Method
from sinkflex.rollout.deadline import DeadlineExceeded, MemoryExceeded, Nursery, Worker, WorkerFault
from sinkflex.trajectory import Group, Outcome, Trajectory

LANES = 16  # episodes that are rewarded at the same time, where each has a worker


class Rewarder:
    """What lives in a worker: a copy of the method as it was when the worker was started."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def reward(self, trajectory: Trajectory) -> RewardParts | Invalid:
        """Return what the method gives."""
        return asyncio.run(self._ask(trajectory))

    async def _ask(self, trajectory: Trajectory) -> RewardParts | Invalid:
        return await self._method.reward(trajectory)


def reward(groups: Sequence[Group], method: Method, workers: Nursery | None = None, seconds: float = 0.0) -> None:
    """Let the method reward the valid episodes; one that gets no reward becomes invalid, and says why.

    Args:
        groups: finished training episodes; they change in place.
        method: its `reward` hook is called.
        workers: where the hook runs if it has a deadline.
        seconds: deadline of one episode's reward; 0 lets the hook run in this process, without one.
    """
    if type(method).reward is Method.reward:
        return  # the environment's rewards stay, and nothing needs to be started
    episodes = [t for group in groups for t in group.valid]
    if workers is None or not seconds:
        given = asyncio.run(_here(episodes, method))
    else:
        given = _in_workers(episodes, method, workers, seconds)
    for t, value in zip(episodes, given, strict=True):
        if isinstance(value, RewardParts) and not math.isfinite(value.total):
            value = Invalid(f"the reward is {value.total}: return a finite number, or raise what went wrong")
        if isinstance(value, RewardParts):
            t.reward, t.reward_parts = value.total, value.parts
            continue
        t.outcome, t.reward = Outcome.INVALID, None
        t.stop_reason, t.fault = _fault(value)


def _fault(value: Invalid | BaseException) -> tuple[StopReason, str]:
    match value:
        case Invalid():
            return StopReason.REWARD_FAULT, value.cause
        case DeadlineExceeded():
            return StopReason.DEADLINE, str(value)
        case MemoryExceeded():
            return StopReason.MEMORY, str(value)
        case WorkerFault():
            return StopReason.REWARD_FAULT, str(value)
    return StopReason.REWARD_FAULT, f"{type(value).__name__}: {value}"


async def _here(episodes: Sequence[Trajectory], method: Method) -> list[RewardParts | Invalid | BaseException]:
    return await asyncio.gather(*map(method.reward, episodes), return_exceptions=True)


def _in_workers(
    episodes: Sequence[Trajectory], method: Method, workers: Nursery, seconds: float
) -> list[RewardParts | Invalid | Exception]:
    """Reward each episode in a worker, `LANES` of them at a time. A worker that dies is replaced."""
    idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
    lanes = min(LANES, max(1, len(episodes)))
    for _ in range(lanes):
        idle.put(None)  # started when it is needed

    def one(trajectory: Trajectory) -> RewardParts | Invalid | Exception:
        worker = idle.get()
        try:
            worker = worker or workers.start(Rewarder, method)
            return worker.call("reward", trajectory, seconds=seconds)
        except WorkerFault as fault:
            if worker is not None:
                worker.close()
                worker = None
            return fault
        except Exception as error:  # the hook's own
            return error
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(lanes) as threads:
        given = list(threads.map(one, episodes))
    for _ in range(lanes):
        if (worker := idle.get()) is not None:
            worker.close()
    return given
