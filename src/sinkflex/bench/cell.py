"""One measurement in a process of its own, and what it measures: CPU seconds, peak memory, bytes kept for the backward.

Times are CPU seconds of one thread. The peak is the rise of the resident high-water mark over the moment before the
call (Linux). Saved bytes are those that autograd keeps, parameters and inputs left out; they do not vary between runs.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]


def in_own_process(module: str, cell: Row, cpu_limit_seconds: int = 1800) -> Row:
    """Run `python -m module CELL` on one thread and return the cell with what it printed.

    A cell that fails, for lack of memory say, comes back with the last line of its error under "refused".
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(cell)]
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (cpu_limit_seconds, cpu_limit_seconds + 5))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=limit)
    if done.returncode == -signal.SIGXCPU:
        return {**cell, "refused": f"not done in {cpu_limit_seconds} s of CPU time"}
    if done.returncode:
        last = [line for line in done.stderr.strip().splitlines() if line.strip()] or [f"exit {done.returncode}"]
        return {**cell, "refused": last[-1]}
    return {**cell, **json.loads(done.stdout.strip().splitlines()[-1])}


def allow_memory(extra_bytes: float) -> None:
    """Let this process allocate so much more than it has (Linux); what asks for more fails instead of the machine."""
    limit = int(status_bytes("VmData") + extra_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median CPU time of a few calls, a first one left out."""
    call()
    times = []
    for _ in range(repeats):
        start = time.thread_time()  # a limit on CPU time makes the process's clock as coarse as the scheduler's ticks
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def peak_operations() -> float:
    """Floating-point operations a second of a 2048 x 2048 float32 product, by CPU time."""
    x = torch.randn(2048, 2048)
    return 2 * 2048**3 / cpu_seconds(lambda: x @ x, 5)


def peak_rise(call: Callable[[], object]) -> int | None:
    """Bytes by which resident memory rises at most during a call; None where the kernel does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """A memory figure of this process, as the kernel tells it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def saved_bytes(call: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps after a forward, each storage once, those of the inputs left out."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        alive = call()
    del alive
    return sum(kept.values())
