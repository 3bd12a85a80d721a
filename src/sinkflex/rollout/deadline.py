"""Deadlines that hold: foreign code (tools, users, judges, rewards) runs in processes that can be killed.

    this process ──control──► nursery ──fork──► worker   builds one object, then answers calls on it
          └───────────────────connection──────────┘

A signal reaches a hung regular expression no more than it reaches a thread, so a call that must end has a process of
its own. The nursery is a process without threads that has loaded what the workers need: a new worker is a fork, ready
at once. In a worker, a thread of C that needs no Python lock (`faulthandler`) writes down where a call hangs and ends
the process at the deadline. When this process dies, however it dies, the nursery ends all workers.

Memory is looked at from outside while a call takes long, and after every call: a worker that has taken more than it may
is killed with what it started.

Calls may come from any thread. There are no signals, and it works on Linux and macOS. Workers are trusted as far as the
code that runs in them is: what they send back is unpickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

START_SECONDS = 60.0  # for imports of the nursery, and for building a worker's object
GRACE_SECONDS = 0.5  # after a deadline, before the worker is killed from outside
LOOK_SECONDS = 0.05  # between two looks at the memory of a worker that is in a call
_SIZE, _PID = struct.Struct("!Q"), struct.Struct("!i")


class WorkerFault(RuntimeError):
    """A worker failed; the text ends with the worker's own traceback, or the last it wrote."""


class DeadlineExceeded(WorkerFault):
    """A call took longer than it may."""


class WorkerDied(WorkerFault):
    """A worker process ended in the middle of a call: a crash, `os._exit`, or a lack of memory."""


class MemoryExceeded(WorkerFault):
    """A worker, with the processes that it started, took more memory than it may."""


class Nursery:
    """Starts workers. A context manager; closing it ends them all.

    Args:
        warm: called once in the nursery; what it imports and caches, all workers share. Not for foreign code.
        memory_bytes: what a worker and the processes that it starts may take, shared pages included; 0 for no limit.

    Raises:
        ValueError: there is a limit, and this machine does not tell the memory of processes.
    """

    def __init__(self, warm: Callable[[], object] = int, memory_bytes: int = 0) -> None:
        if memory_bytes and not group_bytes(os.getpgrp()):
            raise ValueError(
                "a memory limit for workers needs /proc or the program ps, and here is neither. Type "
                "env.memory_gigabytes = 0, or install ps (package procps)."
            )
        self.memory_bytes = memory_bytes
        self._warm = warm
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: set[Worker] = set()

    def start(self, make: Callable[..., Any], *arguments: Any) -> Worker:
        """Fork a worker and build its object there, `make(*arguments)`; all are pickled, functions by their name.

        Raises:
            WorkerFault: there is no worker within `START_SECONDS`, or `make` raised.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._open()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            worker = Worker(self, ours, self._folder)
            self._workers.add(worker)
        worker.open(make, arguments)
        return worker

    def end(self, worker: Worker) -> None:
        """Kill a worker with all that it started. The nursery has not reaped it, so the number is still its own."""
        with self._lock, contextlib.suppress(OSError):
            if worker in self._workers:  # once: the number may be another worker's by now
                self._workers.discard(worker)
                self._control.sendall(b"-" + _PID.pack(worker.pid))

    def close(self) -> None:
        """End the nursery and all its workers."""
        for worker in list(self._workers):
            worker.close()
        with self._lock:
            if self._process is not None:
                self._control.close()
                self._process.wait()
                self._process = None

    def _open(self) -> None:
        if self._process is not None:  # it died: what it left behind goes too
            self._control.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix="sinkflex_workers_"))
        self._control, theirs = socket.socketpair()
        program = "from sinkflex.rollout.deadline import nursery; nursery()"
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(self._folder)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                env={**os.environ, "PYTHONPATH": paths},
            )
        _send(self._control, pickle.dumps(self._warm))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker:
    """An object in a process of its own. After a fault the worker is gone; start another one."""

    def __init__(self, nursery: Nursery, connection: socket.socket, folder: Path) -> None:
        self._nursery, self._connection, self._folder = nursery, connection, folder
        self.pid = 0

    def open(self, make: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Wait for the process, and let it build its object."""
        until = time.monotonic() + START_SECONDS
        self.pid = self._wait("start", until)
        self._ask(("make", make, arguments, START_SECONDS), "start", until)

    def call(self, method: str, *arguments: Any, seconds: float, **named: Any) -> Any:
        """Return what the object's method returns, or raise what it raises, with the worker's traceback as a note.

        Args:
            method: its name.
            arguments, named: what it is called with; they and the result are pickled.
            seconds: deadline; the call costs at most this and `GRACE_SECONDS`.

        Raises:
            DeadlineExceeded: it took longer. The text tells where it hung.
            MemoryExceeded: it took more memory.
            WorkerDied: the process ended.
        """
        return self._ask(("call", method, (arguments, named), seconds), method, time.monotonic() + seconds)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._nursery.end(self)
        with contextlib.suppress(OSError):
            self._log.unlink()

    @property
    def _log(self) -> Path:
        return self._folder / f"{self.pid}.log"

    def _ask(self, request: tuple[Any, ...], what: str, until: float) -> Any:
        try:
            data = pickle.dumps(request)
            _send(self._connection, data, until + GRACE_SECONDS)
        except OSError:
            pass  # it is dead; reading tells how it died
        returned, value, trace, peak = self._wait(what, until)
        self._check_memory(what, peak)
        if returned:
            return value
        value.add_note(f"In the worker:\n{trace}")
        raise value

    def _wait(self, what: str, until: float) -> Any:
        try:
            while self._nursery.memory_bytes and self.pid and not self._answers(until):
                self._check_memory(what, group_bytes(self.pid))
            return pickle.loads(_receive(self._connection, until + GRACE_SECONDS))
        except (OSError, EOFError):
            late = time.monotonic() >= until
            try:
                last = self._log.read_text("utf-8", "replace")[-4000:].strip() if self.pid else ""
            except OSError:
                last = ""
            self.close()
            kind = DeadlineExceeded if late else WorkerDied
            how = "took longer than its deadline" if late else "ended the worker process"
            raise kind(f"{what} {how}" + (f":\n{last}" if last else "")) from None

    def _answers(self, until: float) -> bool:
        """Wait a moment; True if the worker says something, or if its time is over."""
        self._connection.settimeout(LOOK_SECONDS)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return time.monotonic() >= until
        return True

    def _check_memory(self, what: str, size: int) -> None:
        limit = self._nursery.memory_bytes
        if limit and size > limit:
            self.close()
            raise MemoryExceeded(f"{what} took {size / 1e9:.2f} GB of memory, more than the {limit / 1e9:g} it may")


def group_bytes(group: int) -> int:
    """Resident memory of a process group; 0 if the machine does not tell it, or if there is none."""
    if sys.platform != "linux":
        try:
            table = subprocess.run(["ps", "-A", "-o", "pgid=,rss="], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return 0
        return sum(1024 * int(size) for of, size in map(str.split, table.splitlines()) if int(of) == group)
    total = 0
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            facts = Path("/proc", number, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            total += int(facts[21]) * resource.getpagesize() if int(facts[2]) == group else 0
    return total


def nursery() -> NoReturn:
    """Warm up, then fork a worker for every socket that comes in; run by `Nursery` in a process of its own."""
    control, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    workers: set[int] = set()
    with contextlib.suppress(Exception):  # a worker will say why it cannot be built
        pickle.loads(_receive(control))()
    with contextlib.suppress(OSError):
        while message := socket.recv_fds(control, 1, 1):
            command, descriptors = message[:2]
            if command == b"+":
                with contextlib.suppress(OSError):  # no process to be had: the other end reads that the worker is gone
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        _work(socket.socket(fileno=descriptors[0]), folder)
                    workers.add(pid)
                os.close(descriptors[0])
            elif command == b"-":
                (pid,) = _PID.unpack(_exactly(control, _PID.size))
                if pid in workers:  # one of an earlier nursery's is none of ours
                    workers.discard(pid)
                    _kill(pid)
            else:
                break  # our parent is gone
    for pid in workers:
        _kill(pid)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # it may not have become a group yet
    with contextlib.suppress(OSError):
        os.waitpid(pid, 0)


def _work(connection: socket.socket, folder: Path) -> NoReturn:
    """Answer calls until the connection closes; never returns into the nursery's code."""
    try:
        os.setpgid(0, 0)
        log = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        _send(connection, pickle.dumps(os.getpid()))
        target: Any = None
        while True:
            kind, name, arguments, seconds = pickle.loads(_receive(connection))
            os.ftruncate(log, 0)
            faulthandler.enable(log)
            faulthandler.dump_traceback_later(seconds, exit=True, file=log)
            try:
                if kind == "make":
                    target, value = name(*arguments), None
                else:
                    positional, named = arguments
                    value = getattr(target, name)(*positional, **named)
                reply = pickle.dumps((True, value, "", _peak_bytes()))
            except Exception as error:
                reply = _failure(error)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, reply)
    except (OSError, EOFError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _failure(error: Exception) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        reply = pickle.dumps((False, error, trace, _peak_bytes()))
        pickle.loads(reply)
        return reply
    except Exception:  # an exception that cannot travel
        return pickle.dumps((False, WorkerFault(f"{type(error).__name__}: {error}"), trace, _peak_bytes()))


def _peak_bytes() -> int:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _send(connection: socket.socket, data: bytes, until: float | None = None) -> None:
    connection.settimeout(_left(until))
    connection.sendall(_SIZE.pack(len(data)) + data)


def _receive(connection: socket.socket, until: float | None = None) -> bytearray:
    (size,) = _SIZE.unpack(_exactly(connection, _SIZE.size, until))
    return _exactly(connection, size, until)


def _exactly(connection: socket.socket, size: int, until: float | None = None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(_left(until))
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data


def _left(until: float | None) -> float | None:
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
