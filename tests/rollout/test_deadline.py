"""A call in a worker ends at its deadline, whatever runs in it, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sinkflex.rollout import deadline
from sinkflex.rollout.deadline import (
    GRACE_SECONDS,
    DeadlineExceeded,
    MemoryExceeded,
    Nursery,
    Worker,
    WorkerDied,
    WorkerFault,
    group_bytes,
)


class Tools:
    """What people's tools do."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise ValueError("no such database")
        self.calls = 0

    def count(self, step: int = 1) -> int:
        self.calls += step
        return self.calls

    def echo(self, data: bytes) -> bytes:
        return data

    def loop_in_python(self) -> None:
        while True:
            pass

    def loop_in_c(self) -> object:
        return re.match(r"(a+)+$", "a" * 64 + "b")  # never looks at signals, never gives the lock away

    def loop_in_a_program(self, marker: str) -> None:
        subprocess.run(["sleep", marker], check=False)

    def swallow(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1)

    def eat(self) -> None:
        """Takes memory without an end, and takes no notice of a lack of it."""
        self.kept: list[bytes] = []
        while True:
            with contextlib.suppress(BaseException):
                self.kept.append(os.urandom(5_000_000))

    def eat_at_once(self, size: int) -> int:
        return len(b"x" * size)

    def eat_in_a_program(self) -> None:
        subprocess.run(
            [sys.executable, "-c", "import os\nkept = []\nwhile True: kept += [os.urandom(10**6)]"], check=False
        )

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self) -> None:
        sys.exit("enough")

    def fail(self) -> None:
        raise KeyError("customer")

    def fail_with_what_cannot_travel(self) -> None:
        class Local(Exception):
            pass

        raise Local("of this place")


HANGS = ("loop_in_python", "loop_in_c", "swallow")


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with Nursery(Tools) as nursery:
        nursery.start(Tools).close()
        yield nursery


def processes() -> int:
    """Processes below this one, at any depth."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in table.splitlines())
    count = 0
    for pid in parents:
        ancestor = parents[pid]
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        count += ancestor == os.getpid()
    return count


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd"))


def hang(worker: Worker, method: str, seconds: float) -> float:
    """Return how long a call that never returns takes."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"{method} took longer than its deadline"):
        worker.call(method, seconds=seconds)
    return time.monotonic() - started


def test_a_worker_keeps_its_object_and_answers(nursery: Nursery) -> None:
    first, second = nursery.start(Tools), nursery.start(Tools)
    assert [
        first.call("count", seconds=9),
        first.call("count", step=5, seconds=9),
        second.call("count", seconds=9),
    ] == [
        1,
        6,
        1,
    ]
    data = os.urandom(5_000_000)
    assert first.call("echo", data, seconds=9) == data


@pytest.mark.parametrize("method", HANGS)
def test_a_hang_costs_its_deadline_and_is_shown_where_it_is(nursery: Nursery, method: str) -> None:
    worker, other = nursery.start(Tools), nursery.start(Tools)
    assert other.call("count", seconds=9) == 1
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"(?s){method} took longer.*in {method}"):
        worker.call(method, seconds=0.3)
    assert 0.3 <= time.monotonic() - started <= 0.3 + 1
    assert other.call("count", seconds=9) == 2, "another worker was touched"


def test_a_worker_that_is_stopped_from_outside_is_ended_too(nursery: Nursery) -> None:
    worker = nursery.start(Tools)
    os.kill(worker.pid, signal.SIGSTOP)
    assert 0.2 <= hang(worker, "count", 0.2) <= 0.2 + GRACE_SECONDS + 0.5


def test_what_a_worker_started_ends_with_it(nursery: Nursery) -> None:
    marker = f"{500 + os.getpid() / 1e6:.6f}"
    worker = nursery.start(Tools)
    with pytest.raises(DeadlineExceeded):
        worker.call("loop_in_a_program", marker, seconds=0.5)
    running = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert f"sleep {marker}" not in running


def test_deadlines_hold_from_any_thread(nursery: Nursery) -> None:
    workers = [nursery.start(Tools) for _ in range(6)]
    started = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda worker: hang(worker, "loop_in_c", 0.3), workers))
    assert time.monotonic() - started < 0.3 + 1 + 1  # they share two cores
    assert threading.current_thread() is threading.main_thread()


def test_a_dead_worker_leaves_its_traceback_and_is_replaced(nursery: Nursery) -> None:
    for method, words in (("crash", "Fatal Python error.*in crash"), ("leave", "SystemExit: enough")):
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"(?s){method} ended the worker process.*{words}"):
            nursery.start(Tools).call(method, seconds=30)
        assert nursery.start(Tools).call("count", seconds=9) == 1
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("method", ["eat", "eat_in_a_program"])
def test_a_worker_that_takes_too_much_memory_is_killed_and_others_go_on(method: str) -> None:
    limit = 300_000_000
    with Nursery(Tools, memory_bytes=limit) as nursery:
        worker, other = nursery.start(Tools), nursery.start(Tools)
        before = processes()
        with pytest.raises(
            MemoryExceeded, match=rf"{method} took 0\.\d+ GB of memory, more than the 0\.3 it may"
        ) as error:
            worker.call(method, seconds=60)
        size = float(re.search(r"took ([\d.]+) GB", str(error.value))[1])  # type: ignore[index]
        assert limit / 1e9 <= size <= 5 * limit / 1e9, "it was let go on for too long"
        assert other.call("count", seconds=9) == 1
        until = time.monotonic() + 9  # the nursery kills it
        while processes() != before - 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert processes() == before - 1


def test_memory_that_a_short_call_took_is_noticed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "LOOK_SECONDS", 60.0)
    with Nursery(Tools, memory_bytes=300_000_000) as nursery:
        worker = nursery.start(Tools)
        assert worker.call("eat_at_once", 1_000_000, seconds=9) == 1_000_000
        with pytest.raises(MemoryExceeded, match="eat_at_once took"):
            worker.call("eat_at_once", 400_000_000, seconds=9)


def test_a_limit_below_what_a_worker_starts_with_is_said() -> None:
    with Nursery(Tools, memory_bytes=1_000_000) as nursery, pytest.raises(MemoryExceeded, match="start took"):
        nursery.start(Tools)


def test_a_machine_that_does_not_tell_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_bytes(os.getpgrp()) > 5_000_000
    monkeypatch.setattr(sys, "platform", "darwin")
    if shutil.which("ps"):
        assert group_bytes(os.getpgrp()) > 5_000_000
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"neither\. Type env\.memory_gigabytes = 0"):
        Nursery(memory_bytes=1)
    Nursery()


def test_an_exception_keeps_its_type_and_the_workers_traceback(nursery: Nursery) -> None:
    worker = nursery.start(Tools)
    with pytest.raises(KeyError, match="customer") as error:
        worker.call("fail", seconds=9)
    assert re.search(r"(?s)In the worker:.*test_deadline\.py.*in fail", error.value.__notes__[0])
    with pytest.raises(WorkerFault, match="Local: of this place"):
        worker.call("fail_with_what_cannot_travel", seconds=9)
    assert worker.call("count", seconds=9) == 1, "an exception does not end the worker"
    with pytest.raises(ValueError, match="no such database"):
        nursery.start(Tools, True)


def test_the_end_of_the_nursery_is_survived(nursery: Nursery) -> None:
    worker = nursery.start(Tools)
    assert nursery._process is not None
    nursery._process.kill()
    nursery._process.wait()
    assert worker.call("count", seconds=9) == 1
    assert nursery.start(Tools).call("count", seconds=9) == 1
    worker.close()


def test_the_death_of_the_parent_ends_all_hung_workers(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, threading
        from sinkflex.rollout.deadline import Nursery
        from tests.rollout.test_deadline import Tools

        nursery = Nursery()
        workers = [nursery.start(Tools) for _ in range(2)]
        for worker in workers:
            threading.Thread(target=worker.call, args=("loop_in_c",), kwargs={"seconds": 500}).start()
        print(nursery._folder, nursery._process.pid, *(worker.pid for worker in workers), flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *pids = parent.stdout.readline().split()
        parent.kill()
    until = time.monotonic() + 5
    while any(map(alive, map(int, pids))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, map(int, pids)))
    assert not Path(folder).exists()


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_hangs_leave_no_process_thread_or_descriptor_behind(nursery: Nursery, count: int) -> None:
    before = processes(), threading.active_count(), descriptors()
    costs = [hang(nursery.start(Tools), HANGS[i % 3], 0.05) for i in range(count)]
    assert max(costs) <= 0.05 + 1
    assert (processes(), threading.active_count(), descriptors()) == before
    assert not list(nursery._folder.iterdir())
