from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sinkflex.methods.grpo import GRPO
from sinkflex.processes import in_processes, in_threads, processes, shares_of
from sinkflex.recipe import ConfigError, load_config
from sinkflex.train import train
from tests.methods.small_run import SMOKE, small
from tests.test_train import config, files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a run plays alone where forks are not safe")
HERE = os.getpid()


def test_shares_hold_every_group_once_and_none_is_empty() -> None:
    for count in range(1, 9):
        for wanted in range(1, 12):
            shares = shares_of(count, wanted)
            assert sorted(i for share in shares for i in share) == list(range(count))
            assert all(shares) and len(shares) == min(wanted, count)


def test_each_share_is_played_in_a_process_of_its_own_with_the_state_as_it_was() -> None:
    state = {"seen": 0}

    def play(share: Sequence[int]) -> tuple[int, int, list[int]]:
        state["seen"] += 1
        return os.getpid(), state["seen"], list(share)

    threads = torch.get_num_threads()
    played = in_processes(play, [[0, 2], [1], [3]])
    assert [share for _, _, share in played] == [[0, 2], [1], [3]]
    assert len({pid for pid, _, _ in played}) == 3 and played[0][0] == HERE
    assert [seen for _, seen, _ in played] == [1, 1, 1] and state["seen"] == 1
    assert torch.get_num_threads() == threads


def test_a_failure_in_a_fork_comes_back_with_its_traceback_and_leaves_no_process() -> None:
    def play(share: Sequence[int]) -> int:
        if os.getpid() != HERE:
            raise ZeroDivisionError("the fork's own")
        return 0

    with pytest.raises(ZeroDivisionError, match="the fork's own") as caught:
        in_processes(play, [[0], [1], [2]])
    assert "in play" in caught.value.__notes__[0]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


class Odd(Exception):
    """Cannot be made from its own arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_travel_comes_back_as_its_traceback() -> None:
    def play(share: Sequence[int]) -> int:
        if os.getpid() != HERE:
            raise Odd(1, 2)
        return 0

    with pytest.raises(RuntimeError, match=r"(?s)in play.*Odd: 1 and 2"):
        in_processes(play, [[0], [1]])


def test_no_fork_is_left_if_a_later_one_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    forked, fork = [], os.fork

    def few() -> int:
        if len(forked) == 2:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", few)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        in_processes(lambda share: time.sleep(60 if os.getpid() != HERE else 0), [[0], [1], [2], [3]])
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_fork_has_started_is_not_waited_for(dies: bool) -> None:
    def play(share: Sequence[int]) -> int:
        if os.getpid() != HERE:
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        return share[0]

    started = time.monotonic()
    assert in_processes(play, [[0], [1]]) == [0, 1]
    assert time.monotonic() - started < 10


def test_a_failure_at_home_ends_the_forks_at_once() -> None:
    def play(share: Sequence[int]) -> int:
        if os.getpid() != HERE:
            time.sleep(60)
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_processes(play, [[0], [1]])
    assert time.monotonic() - started < 5
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_fork_that_is_killed_is_replaced_and_no_descriptor_is_left() -> None:
    def play(share: Sequence[int]) -> list[int]:
        if os.getpid() != HERE and 1 in share:
            os.kill(os.getpid(), signal.SIGKILL)
        return [10 * i for i in share]

    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert in_processes(play, [[0], [1], [2]]) == [[0], [10], [20]]
    assert len(os.listdir("/proc/self/fd")) == open_files


def _parent(path: str) -> None:
    def play(share: Sequence[int]) -> int:
        if share[0] == 1:
            Path(path).write_text(str(os.getpid()))
            time.sleep(60)
        while not Path(path).exists() or not Path(path).read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    in_processes(play, [[0], [1]])


def test_forks_of_a_process_that_is_killed_end_too(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("fork").Process(target=_parent, args=(str(tmp_path / "pid"),))
    parent.start()
    parent.join(30)
    assert parent.exitcode == -signal.SIGKILL
    fork = int((tmp_path / "pid").read_text())
    for _ in range(500):
        status = Path(f"/proc/{fork}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    os.kill(fork, signal.SIGKILL)
    raise AssertionError("the fork lived on, with the lock of its run directory")


def test_a_run_on_two_processes_samples_what_one_samples_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    train(config(tmp_path / "alone", "train.steps=1"))
    both = ("train.steps=2", "run.processes=2", "train.checkpoint_every=1")
    train(config(tmp_path / "first", *both))
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path / "second", *both), interrupted=lambda: True)
    train(config(tmp_path / "second", *both), interrupted=lambda: False)
    one, two = (tmp_path / name / "trajectories" / "step_1.jsonl.zst" for name in ("alone", "first"))
    assert sampled(one) == sampled(two)
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    names = [name for name in first if first[name] != second.get(name)]
    assert names == [], "the drafts that forks found out are part of the state"


def sampled(path: Path) -> list[list[list[int]]]:
    from sinkflex.trajectory import read_trajectories

    return [[turn.action_ids for turn in t.turns] for group in read_trajectories(path) for t in group.members]


class Forgetful(GRPO):
    """A method that counts its prompts."""

    count = 0

    def prompt(self, task: Any, phase: str) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_a_method_whose_state_changes_while_it_acts_is_refused_on_two_processes(tmp_path: Path) -> None:
    name = f"{__name__}:Forgetful"
    with pytest.raises(ValueError, match=r"--set run\.processes=1"):
        train(small(tmp_path, name, "run.processes=2"))
    assert train(small(tmp_path, name, "run.processes=1")).method.state_dict()["count"] > 0


def test_forks_and_deadlines_exclude_each_other_and_a_gpu_is_not_shared() -> None:
    with pytest.raises(ConfigError, match=r"run\.processes = 1 or no deadline"):
        load_config(SMOKE, ["run.processes=2", "env.deadline_seconds=5", "run.deterministic=false"])
    assert [processes(3, torch.device(kind)) for kind in ("cpu", "cuda")] == [3, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_no_thread_begins_another_part_after_one_failed(place: int) -> None:
    begun = []

    def work(at: int, part: int) -> None:
        begun.append(part)
        if at == place:
            raise ZeroDivisionError(part)
        time.sleep(0.1)

    with pytest.raises(ZeroDivisionError, match=str(place)):
        in_threads(work, [range(0, 100, 2), range(1, 100, 2)])
    assert len(begun) <= 4


@pytest.mark.parametrize("parts", [[1, 100], [50, 50]], ids=["while it waits", "while it works"])
def test_ctrl_c_does_not_wait_for_the_parts_of_threads(parts: list[int]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are born deaf to it
    try:
        interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            in_threads(lambda place, part: time.sleep(0.05), [range(count) for count in parts])
        assert time.monotonic() - started < 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_parts_come_back_share_by_share_from_one_core_each() -> None:
    threads = torch.get_num_threads()
    found = in_threads(lambda place, part: (place, part, torch.get_num_threads()), shares_of(5, 2))
    assert found == [(0, 0, 1), (0, 2, 1), (0, 4, 1), (1, 1, 1), (1, 3, 1)]
    assert torch.get_num_threads() == threads
