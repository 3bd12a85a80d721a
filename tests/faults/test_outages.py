"""Servers that die, calls that hang, disks that fill: no score is wrong, nothing is lost, and the run goes on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disturbed import require_equal, small
from own_users import HelpfulUser, stuck

from sinkflex import checkpoint
from sinkflex.envs.env import Action, StopReason
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.run import Outage, Run
from sinkflex.train import train
from sinkflex.trajectory import read_trajectories

STEPS = 4


def own(directory: Path, *overrides: str, user: str = "HelpfulUser") -> Any:
    return small(directory, f"env.user=own_users:{user}", *overrides)


def refuse(*_: Any) -> Any:
    raise ConnectionError("refused")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "whole"
    train(own(directory))
    return directory


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("purpose", ["train", "validation"])
def test_an_outage_stops_the_run_and_leaves_no_trace_in_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    """The user's server is away in the middle of the run, for steps or for the last validation."""
    rollout = Run.rollout

    def with_outages(run: Run, task_ids: list[str], size: int, name: str, *rest: Any, **named: Any) -> Any:
        down = name.startswith(purpose) and run.step in (2, STEPS)
        with monkeypatch.context() as patch:
            if down:
                patch.setattr(HelpfulUser, "reset", refuse)
            return rollout(run, task_ids, size, name, *rest, **named)

    directory = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "rollout", with_outages)
        with pytest.raises(Outage, match=r"(?s)\d+ of \d+ episodes of .*ConnectionError: refused.*same command again"):
            train(own(directory))
    saved = checkpoint.latest(directory / "checkpoints")
    assert saved is not None and saved.step == (2 if purpose == "train" else STEPS)
    train(own(directory))
    require_equal(directory, whole, STEPS)
    assert sum(record.get("rollout/invalid", 0) for record in records(directory)) == 0


def test_a_short_outage_is_retried_and_the_rewards_are_those_of_a_clean_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset, calls = HelpfulUser.reset, itertools.count()

    def away_for_a_while(user: HelpfulUser, task: Any, seed: int) -> Any:
        return refuse() if 30 <= next(calls) < 34 else reset(user, task, seed)

    monkeypatch.setattr(HelpfulUser, "reset", away_for_a_while)
    train(own(tmp_path / "run"))
    ours, theirs = records(tmp_path / "run"), records(whole)
    assert sum(record.get("rollout/retried", 0) for record in ours) == 4
    names = ("rollout/episodes", "rollout/invalid", "reward/mean", "rollout/turns_mean")
    assert [[r.get(name) for name in names] for r in ours] == [[r.get(name) for name in names] for r in theirs]


@pytest.mark.parametrize(
    ("user", "seconds", "reason", "words"),
    [
        ("StuckUser", 3, StopReason.DEADLINE, "own_users.py"),
        ("HungryUser", 60, StopReason.MEMORY, "more than the 0.5 it may"),
    ],
)
def test_a_call_that_hangs_or_eats_memory_costs_its_limit_and_no_other_episode(
    user: str, seconds: int, reason: StopReason, words: str, tmp_path: Path
) -> None:
    options = ("run.deterministic=false", "rollout.retries=0", "rollout.invalid_limit=0.99", "train.steps=0")
    limits = (f"env.deadline_seconds={seconds}", "env.memory_gigabytes=0.5")
    run = train(own(tmp_path / "run", *options, *limits, user=user))
    groups = read_trajectories(tmp_path / "run" / "trajectories" / "validation_0.jsonl.zst")
    assert 0 < sum(stuck(group.task_id) for group in groups) < len(groups)
    for group in groups:
        assert [t.valid for t in group.members] == [not stuck(group.task_id)]
        for t in group.members:
            assert t.valid or (t.stop_reason is reason and words in str(t.fault))
            assert (t.user, t.domain) == ("helpful", "mock")
    assert run.workers._process is None, "nothing is left behind"


@pytest.mark.slow
def test_a_judge_that_hangs_costs_its_deadline_and_no_other_episode(tmp_path: Path) -> None:
    options = ("method.name=own_judges:StuckJudge", "method.reward_seconds=5", "run.deterministic=false")
    run = train(own(tmp_path / "run", *options, "train.steps=1"))
    (record,) = (record for record in records(tmp_path / "run") if record["step"] == 1)
    assert record["rollout/invalid"] == record["rollout/invalid/deadline"] == 2
    assert record["reward/mean"] == record["rollout/episodes"] / 4 and record["learner/gradient_norm"] > 0
    for group in read_trajectories(tmp_path / "run" / "trajectories" / "step_1.jsonl.zst"):
        assert [t.reward for t in group.members] == [None, 1.0, 2.0, 3.0]
        assert "own_judges.py" in str(group.members[0].fault)
    assert run.workers._process is None, "nothing is left behind"


def test_a_run_in_workers_is_the_run_without(whole: Path, tmp_path: Path) -> None:
    train(own(tmp_path / "run", "env.deadline_seconds=60", "run.deterministic=false"))
    require_equal(tmp_path / "run", whole, STEPS)


def test_the_wall_clock_may_jump(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0, 4e9))
    train(own(tmp_path / "run"))
    require_equal(tmp_path / "run", whole, STEPS)


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_disk_that_fills_up_or_turns_read_only_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    size = sum(path.stat().st_size for path in (whole / "checkpoints" / f"step_{STEPS}").rglob("*") if path.is_file())
    with disk(folder, f"{size * 5 // 2}"):
        with pytest.raises(Exception, match=r"No space left|os error 28") as full:
            train(own(folder / "run"))
        del full
        saved = checkpoint.latest(folder / "run" / "checkpoints")
        assert saved is None or saved.step < STEPS
        remount(folder, "size=64m,ro")
        with pytest.raises(OSError) as refused:
            train(own(folder / "run"))
        assert refused.value.errno == errno.EROFS
        del refused
        remount(folder, "rw")
        train(own(folder / "run"))
        require_equal(folder / "run", whole, STEPS)


def test_ten_thousand_turns_end(tmp_path: Path) -> None:
    env = Tau2Env("mock", user=HelpfulUser(), max_turns=10_000)
    env.reset(seed=0, options={"task_id": "create_task_1"})
    started, turns, truncated = time.monotonic(), 0, False
    while not truncated:
        turns += 1
        truncated = env.step(Action("Anything else?"))[3]
    assert turns == 10_000
    assert time.monotonic() - started < 60
