"""Work on several cores: forked copies of this process play some of the groups each, threads add up the gradient.

A small policy does not keep two cores busy with one matrix product, but two products do. Episodes are mostly Python,
which one process runs on one core, so they are played in forks: a fork has the weights, the method and the caches as
they are, so that nothing needs to be sent to it; what comes back is what it found. An update is mostly matrix products,
which threads of one process run side by side without a copy of its memory. Which part is worked on where depends on the
number of parts alone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

Work = Callable[[Sequence[int]], Any]
PARENT_DEATH = 1  # PR_SET_PDEATHSIG
HEADER = 8  # bytes that say how long an answer is


def processes(wanted: int, device: torch.device) -> int:
    """Return how many processes may work: a GPU is not shared, and forks are safe on Linux alone."""
    return wanted if device.type == "cpu" and sys.platform == "linux" else 1


def shares_of(count: int, processes: int) -> list[range]:
    """Return which of `count` parts each process or thread works on; none has nothing to do."""
    return [range(first, count, processes) for first in range(min(processes, count))]


def in_processes(work: Work, shares: Sequence[Sequence[int]]) -> list[Any]:
    """Return `work(share)` of each share: the first is worked on here, each other one in a fork, on one thread each.

    A fork that is killed is replaced: its share is worked on here, after the first, and may differ in its last bits.

    Raises:
        Exception: what `work` raised in a fork, with its traceback as a note.
    """
    if len(shares) == 1:
        return [work(shares[0])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forks: list[_Fork] = []
    try:
        for share in shares[1:]:
            forks.append(_Fork(work, share))
        return [work(shares[0]), *(fork.result() for fork in forks)]
    finally:
        for fork in forks:
            fork.end()
        torch.set_num_threads(threads)


def in_threads(work: Callable[[int, int], Any], shares: Sequence[Sequence[int]]) -> list[Any]:
    """Return `work(place, part)` of each part, share by share: the first here, the others in threads, on one core each.

    Raises:
        BaseException: of Ctrl-C, or what `work` raised in the first share that failed; no thread begins another part.
    """
    if len(shares) == 1:
        return [work(0, part) for part in shares[0]]
    over = threading.Event()

    def alone(place: int, share: Sequence[int]) -> list[Any]:
        torch.set_num_threads(1)  # a thread has a number of its own
        try:
            return [work(place, part) for part in share if not over.is_set()]
        except BaseException:
            over.set()
            raise

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(shares) - 1) as pool:
            try:
                others = [pool.submit(alone, place, share) for place, share in enumerate(shares) if place]
                found = [alone(0, shares[0]), *(other.result() for other in others)]
            finally:
                over.set()
        return [of_part for of_share in found for of_part in of_share]
    finally:
        torch.set_num_threads(threads)


class _Fork:
    """A copy of this process that works on one share and ends."""

    def __init__(self, work: Work, share: Sequence[int]) -> None:
        self._work, self._share = work, share
        self._reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            with warnings.catch_warnings():
                # Other threads of this process only write logs; the fork never waits for them.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:
            os.close(self._reading)
            os.close(writing)
            raise
        if self._pid == 0:
            os.close(self._reading)
            _work_and_leave(parent, work, share, writing)
        os.close(writing)

    def result(self) -> Any:
        """Wait for what was found."""
        answer = self._receive()
        self.end()
        if answer is None:
            return self._work(self._share)
        failed, value = pickle.loads(answer)  # from our own fork
        if failed:
            raise value
        return value

    def end(self) -> None:
        """Make sure that the process is gone."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1

    def _receive(self) -> bytes | None:
        """Return the answer, which begins with its size; None if the process died before its end."""
        data = bytearray()
        while len(data) < HEADER or len(data) < HEADER + int.from_bytes(data[:HEADER], "big"):
            if select.select([self._reading], [], [], 1.0)[0]:
                chunk = os.read(self._reading, 2**20)
                if not chunk:
                    return None
                data += chunk
            elif os.waitpid(self._pid, os.WNOHANG)[0]:  # what it started may hold the pipe open
                self._pid = 0
                return None
        return bytes(data[HEADER:])


def _work_and_leave(parent: int, work: Work, share: Sequence[int], writing: int) -> None:
    """What a fork does. It never returns: nothing of the program it was copied from may run twice."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        if sys.platform == "linux":  # a parent that is killed takes its forks along
            ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
        torch.set_num_threads(1)
        try:
            answer = pickle.dumps((False, work(share)))
        except BaseException as error:
            answer = pickle.dumps((True, _portable(error)))
        if os.getppid() == parent:
            with os.fdopen(writing, "wb") as file:
                file.write(len(answer).to_bytes(HEADER, "big") + answer)
    finally:
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """Return an exception that can travel, with its traceback as a note."""
    text = "In a copy of the process:\n" + traceback.format_exc()
    try:
        copied = pickle.loads(pickle.dumps(error))
        if type(copied) is type(error) and str(copied) == str(error):
            copied.add_note(text)
            pickle.dumps(copied)
            return copied
    except Exception:  # of any kind: it cannot travel
        pass
    return RuntimeError(text)
