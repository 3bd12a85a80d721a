"""Kills a run again and again: a program, since what it forks must have no threads.

    python killing.py RECIPE KILLS FOLDER      RECIPE is the name of a function of `disturbed.py`

One process imports everything, then forks a child for each attempt at a run. Every second kill comes at a random time,
from outside; the others are aimed: they come at a random call of one of `PLACES`, in turn. Prints a line a kill.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from functools import reduce, wraps
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import disturbed

import sinkflex.train

PLACES = {
    "rollout": "sinkflex.policy.sampler:Sampler.tick",
    "trajectories": "sinkflex.train:write_trajectories",
    "accumulation": "sinkflex.learner.step:forest",  # once a micro-batch
    "optimizer step": "sinkflex.learner.step:Learner._apply",
    "metrics": "sinkflex.writers:JsonlWriter.write",
    "checkpoint": "sinkflex.checkpoint:_sync",  # once a file, and after the renaming
}
# Calls of each place in the newest attempt, written by the child.
calls = RawArray("l", len(PLACES))


def watch(aim: tuple[int, int]) -> None:
    """Count the calls of all places, and die at one of them: `aim` is the place's number and the call's."""
    for number, path in enumerate(PLACES.values()):
        module, _, names = path.partition(":")
        *owners, name = names.split(".")
        owner: Any = reduce(getattr, owners, importlib.import_module(module))

        def counted(function: Any, number: int) -> Any:
            @wraps(function)
            def call(*arguments: Any, **named: Any) -> Any:
                calls[number] += 1
                if (number, calls[number]) == aim:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return call

        setattr(owner, name, counted(getattr(owner, name), number))


def attempt(make: Any, directory: Path, seconds: float | None = None, aim: tuple[int, int] = (-1, 0)) -> bool:
    """Start or continue a run in a child; True if it was killed."""
    calls[:] = [0] * len(PLACES)
    child = os.fork()
    if child == 0:
        watch(aim)
        sinkflex.train.train(make(directory))
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"{directory} ended with status {status}"
    return status == signal.SIGKILL


def main() -> None:
    """Run once undisturbed, then kill."""
    make, kills, folder = getattr(disturbed, sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    started = time.monotonic()
    assert not attempt(make, folder / "whole")
    whole, counts = time.monotonic() - started, list(calls)
    assert all(counts), f"this run never comes to some of the places: {dict(zip(PLACES, counts, strict=True))}"
    choose, done, number = random.Random(0), 0, 0
    while done < kills:
        directory = folder / f"killed_{number}"
        for _ in range(min(1 + number % 3, kills - done)):  # some runs are killed twice, some three times
            if done % 2:
                place = done // 2 % len(PLACES)
                hit = attempt(make, directory, aim=(place, choose.randint(1, counts[place])))
                kind = list(PLACES)[place]
            else:
                hit, kind = attempt(make, directory, choose.uniform(0, 0.9 * whole)), "any time"
            done += hit
            reached = ", ".join(f"{count} {name}" for name, count in zip(PLACES, calls, strict=True))
            print(directory.name, "killed" if hit else "missed", f"{kind}: after {reached}", sep="\t", flush=True)
        attempt(make, directory)
        number += 1


if __name__ == "__main__":
    main()
