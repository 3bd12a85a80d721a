"""Calls of environments: made at once, or in threads where they wait for a server or a worker process.

An episode is a generator that yields the calls of its environment. All else that it does runs here, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Self

from sinkflex.envs.env import EnvironmentFault

THREADS = 128
Steps = Generator[Callable[[], Any], Any, Any]


def complete(steps: Steps) -> Any:
    """Make the calls of one generator, one after the other, and return what it returns."""
    with Calls() as calls:
        calls.start(0, steps, waits=False)
        ((_, value),) = calls.finished()
        return value


class Calls:
    """The calls that are under way. A context manager: it leaves no thread behind that has a call to make."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[Future[Any], tuple[int, Steps]] = {}
        self._done: list[tuple[int, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __bool__(self) -> bool:
        return bool(self._running or self._done)

    def start(self, number: int, steps: Steps, waits: bool) -> None:
        """Go through a generator's calls: now, or in threads if they may wait for something outside."""
        self._go_on(number, steps, lambda: next(steps), waits)

    def finished(self, threads: str = "ended") -> Iterator[tuple[int, Any]]:
        """Yield (number, what its generator returned), those of threads in the order of the starts.

        Args:
            threads: which of those that run in threads: "none", those that have "ended", wait for the "first" or for
                "all".
        """
        while self._running and threads != "none":
            if threads == "all" or (threads == "first" and not self._done):
                wait(self._running, return_when=ALL_COMPLETED if threads == "all" else FIRST_COMPLETED)
            ended = [future for future in self._running if future.done()]
            if not ended:
                break
            for future in ended:
                number, steps = self._running.pop(future)
                self._go_on(number, steps, lambda f=future, s=steps: _resume(s, f.result), True)
        done, self._done = self._done, []
        yield from done

    def _go_on(self, number: int, steps: Steps, resume: Callable[[], Callable[[], Any]], waits: bool) -> None:
        try:
            call = resume()
            while not waits:
                call = _resume(steps, call)
        except StopIteration as end:
            self._done.append((number, end.value))
        else:
            self._pool = self._pool or ThreadPoolExecutor(THREADS, "environment")
            self._running[self._pool.submit(call)] = (number, steps)


def _resume(steps: Steps, call: Callable[[], Any]) -> Callable[[], Any]:
    """Give a generator what a call returns, or the fault that it raises, and return its next call."""
    try:
        value = call()
    except EnvironmentFault as fault:
        return steps.throw(fault)
    return steps.send(value)
