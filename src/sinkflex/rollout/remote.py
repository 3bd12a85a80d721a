"""Environments in processes of their own: whatever their tools and users do, a call ends at its deadline."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sinkflex.envs.env import DeadlineFault, EnvironmentFault, MemoryFault
from sinkflex.envs.own import is_own, own_environment
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.rollout.deadline import DeadlineExceeded, MemoryExceeded, Nursery, Worker, WorkerFault

_FAULTS: dict[type[WorkerFault], type[EnvironmentFault]] = {
    DeadlineExceeded: DeadlineFault,
    MemoryExceeded: MemoryFault,
}


def warm_up(domain: str, module: str) -> None:
    """Load what workers need: the tasks of a domain, and the module of a method whose rewards they give, if any."""
    own_environment(domain) if is_own(domain) else Tau2Env(domain)
    if module:
        importlib.import_module(module)


class RemoteEnv:
    """What a rollout uses of an environment; the real one lives in a worker, which `reset` replaces if it died.

    Args:
        nursery: starts the worker.
        seconds: deadline of one call.
        known: what is known of every episode before it begins, "domain" and "user": the info of a worker that dies.
        make, arguments: what makes the environment in the worker.

    Attributes:
        waits: whether its calls wait for something outside, which who makes it knows.
    """

    def __init__(
        self, nursery: Nursery, seconds: float, known: Mapping[str, Any], make: Callable[..., Any], *arguments: Any
    ) -> None:
        self._seconds, self._known = seconds, known
        self.waits = False
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
        except WorkerFault as died:
            self.close()
            fault = _FAULTS.get(type(died), EnvironmentFault)(str(died))
            fault.info = dict(self._known)
            raise fault from died
