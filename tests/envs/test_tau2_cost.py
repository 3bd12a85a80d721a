"""What episodes cost: time, memory, threads. Limits are generous; an idle machine needs a fraction."""

from __future__ import annotations

import gc
import statistics
import threading
import time
import tracemalloc
from typing import Any

from tau2_play import calls

from sinkflex.envs.env import Action
from sinkflex.envs.tau2.env import Tau2Env


def abort_episodes(count: int) -> None:
    for i in range(count):
        env = Tau2Env("telecom", split="train")
        env.reset(seed=i % 5)
        env.step(Action(text="Please check the status bar."))


def test_aborted_episodes_leave_neither_threads_nor_memory():
    abort_episodes(10)
    gc.collect()
    threads = threading.active_count()
    tracemalloc.start()
    abort_episodes(10)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    abort_episodes(100)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert threading.active_count() == threads
    assert after - before < 200_000, f"{after - before} bytes left by 100 aborted episodes"


def test_256_live_environments_fit_in_100_megabytes():
    Tau2Env("telecom").reset(seed=0)
    tracemalloc.start()
    live = [Tau2Env("telecom", split="train") for _ in range(256)]
    for i, env in enumerate(live):
        env.reset(seed=i)
        env.step(Action(text="Please check the status bar."))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 100e6, f"{used / 1e6:.0f} MB"


def median_seconds(function: Any, count: int = 100) -> float:
    times = []
    for i in range(count):
        start = time.perf_counter()
        function(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_resets_and_steps_are_cheap():
    """Limits are several times what an idle machine needs: 0.5 ms a telecom reset, 0.2 ms a step, 0.2 ms elsewhere."""
    env = Tau2Env("telecom", split="train", max_turns=1000)
    assert median_seconds(lambda i: env.reset(seed=i)) < 5e-3
    assert median_seconds(lambda i: env.step(calls("get_details_by_id", id="L1002"))) < 5e-3
    for domain in ("retail", "airline"):
        env = Tau2Env(domain, split="base", solo=True)
        env.reset(seed=0)
        assert median_seconds(lambda i, env=env: env.reset(seed=i)) < 5e-3
        assert median_seconds(lambda i, env=env: env.score()) < 50e-3
