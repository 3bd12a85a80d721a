"""Calls of environments: made at once, or in threads where they wait for a server or a worker process.

An episode is a generator that yields the calls of its environment. All else that it does runs here, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any

from sinkflex.envs.env import EnvironmentFault

Steps = Generator[Callable[[], Any], Any, Any]


def complete(steps: Steps) -> Any:
    """Make the calls of one generator, one after the other, and return what it returns."""
    calls = Calls()
    calls.start(0, steps, waits=False)
    ((_, value),) = calls.finished()
    return value


class Calls:
    """The calls that are under way."""

    def __init__(self) -> None:
        self._running: dict[Future[Any], tuple[int, Steps]] = {}
        self._done: list[tuple[int, Any]] = []

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
            self._running[_in_thread(call)] = (number, steps)


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread that keeps no process alive: Ctrl-C does not wait for a server."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by who asks for the result
            future.set_exception(error)

    Thread(target=run, name="environment", daemon=True).start()
    return future


def _resume(steps: Steps, call: Callable[[], Any]) -> Callable[[], Any]:
    """Give a generator what a call returns, or the fault that it raises, and return its next call."""
    try:
        value = call()
    except EnvironmentFault as fault:
        return steps.throw(fault)
    except StopIteration as error:  # would look like the end of the generator
        raise RuntimeError("an environment raised StopIteration") from error
    return steps.send(value)
