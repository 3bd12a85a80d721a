"""Environments in processes of their own: whatever their tools and users do, a call ends at its deadline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sinkflex.envs.env import DeadlineFault, EnvironmentFault
from sinkflex.rollout.deadline import DeadlineExceeded, Nursery, Worker, WorkerFault


class RemoteEnv:
    """What a rollout uses of an environment; the real one lives in a worker, which `reset` replaces if it died.

    Args:
        nursery: starts the worker.
        seconds: deadline of one call.
        make, arguments: what makes the environment in the worker.
    """

    def __init__(self, nursery: Nursery, seconds: float, make: Callable[..., Any], *arguments: Any) -> None:
        self._seconds = seconds
        self._start = partial(nursery.start, make, *arguments)
        self._worker: Worker | None = None
        for method in ("reset", "step", "truncate"):
            setattr(self, method, partial(self._call, method))

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            if self._worker is None:
                assert method == "reset", "the worker is gone, and its episode with it"
                self._worker = self._start()
            return self._worker.call(method, *arguments, seconds=self._seconds, **named)
        except WorkerFault as fault:
            self.close()
            raise (DeadlineFault if isinstance(fault, DeadlineExceeded) else EnvironmentFault)(str(fault)) from fault
