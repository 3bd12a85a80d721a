"""A rollout on several cores: forked copies of this process play some of the groups each.

A small policy does not keep two cores busy with one matrix product, but two rollouts do. A fork has the weights, the
method and the caches as they are, so that nothing needs to be sent to it; what comes back is what it played. Which
groups a process plays, and so what its passes hold, depends on their number alone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

Play = Callable[[Sequence[int]], Any]
PARENT_DEATH = 1  # PR_SET_PDEATHSIG


def processes(wanted: int, device: torch.device) -> int:
    """Return how many processes may play: a GPU is not shared, and forks are safe on Linux alone."""
    return wanted if device.type == "cpu" and sys.platform == "linux" else 1


def shares_of(count: int, processes: int) -> list[range]:
    """Return which of `count` groups each process plays; none plays nothing."""
    return [range(first, count, processes) for first in range(min(processes, count))]


def in_processes(play: Play, shares: Sequence[Sequence[int]]) -> list[Any]:
    """Return `play(share)` of each share: the first is played here, each other one in a fork, on one thread each.

    A fork that is killed is replaced: its share is played here.

    Raises:
        RuntimeError: `play` failed in a fork, with its traceback.
    """
    if len(shares) == 1:
        return [play(shares[0])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forks: list[_Fork] = []
    try:
        forks += [_Fork(play, share) for share in shares[1:]]
        return [play(shares[0]), *(fork.result() for fork in forks)]
    finally:
        for fork in forks:
            fork.end()
        torch.set_num_threads(threads)


class _Fork:
    """A copy of this process that plays one share and ends."""

    def __init__(self, play: Play, share: Sequence[int]) -> None:
        self._play, self._share = play, share
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Other threads of this process only write logs; the fork never waits for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            _play_and_leave(parent, play, share, writing)
        os.close(writing)
        self._answer = os.fdopen(reading, "rb")

    def result(self) -> Any:
        """Wait for what was played."""
        with self._answer:
            answer = self._answer.read()
        self.end()
        try:
            failed, value = pickle.loads(answer)  # from our own fork
        except (EOFError, pickle.UnpicklingError):
            return self._play(self._share)
        if failed:
            raise RuntimeError(f"a rollout process failed:\n{value}")
        return value

    def end(self) -> None:
        """Make sure that the process is gone."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        self._answer.close()


def _play_and_leave(parent: int, play: Play, share: Sequence[int], writing: int) -> None:
    """What a fork does. It never returns: nothing of the program it was copied from may run twice."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        if sys.platform == "linux":  # a parent that is killed takes its forks along
            ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
        torch.set_num_threads(1)
        try:
            answer = pickle.dumps((False, play(share)))
        except BaseException:
            answer = pickle.dumps((True, traceback.format_exc()))
        if os.getppid() == parent:
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
    finally:
        os._exit(0)
