"""`sinkflex bench env`: what an environment costs, beside the package's own environment class.

    reset    start an episode on a task of the split, and what the package needs for a new world
    step     one agent turn, user included, of a scripted agent that solves the tasks
    score    the score of an ended episode, the first of a task with its gold state
    live     resident memory that many environments in mid-episode add to one

Each domain runs in a process of its own, on one thread. Times are wall-clock: their medians stand a busy machine.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from sinkflex.bench.cell import Row, in_own_process, status_bytes

DOMAINS = ("telecom", "retail", "airline", "mock")
LIVE, TURNS = 300, 15  # environments that live at once, each so many turns into its episode


def run(domains: tuple[str, ...] = DOMAINS) -> list[Row]:
    """Measure each domain."""
    return [in_own_process(__name__, {"domain": domain}) for domain in domains]


def measure(cell: Row) -> Row:
    """Measure one domain in this process: milliseconds (median, and the slowest hundredth) and megabytes."""
    from sinkflex.envs.tau2.env import Tau2Env
    from sinkflex.envs.tau2.tasks import load
    from sinkflex.tasks.oracle import oracle

    domain = cell["domain"]
    split = "base" if domain == "mock" else "train"
    tasks = [task.task_id for task in load(domain, split)]
    resets: list[float] = []
    steps: list[float] = []
    scores: list[float] = []

    def started(number: int) -> tuple[Any, Any, list[Any]]:
        task_id = tasks[number % len(tasks)]
        env, agent = Tau2Env(domain=domain, split=split, max_turns=200), oracle(domain, task_id)
        agent.reset(number)
        began = time.perf_counter()
        observation, _ = env.reset(seed=number, options={"task_id": task_id})
        resets.append(time.perf_counter() - began)
        return env, agent, list(observation)

    def played(env: Any, agent: Any, messages: list[Any], turns: int) -> Any:
        for _ in range(turns):
            action = agent.act(messages)
            began = time.perf_counter()
            observation, _, terminated, truncated, _ = env.step(action)
            steps.append(time.perf_counter() - began)
            messages += observation
            if terminated or truncated:
                scores.append(_seconds(env.score))
                break
        return env

    for number in range(2 * len(tasks)):
        played(*started(number), turns=200)
    before = status_bytes("VmRSS")
    live = [played(*started(number), turns=TURNS) for number in range(LIVE)]
    rise = status_bytes("VmRSS") - before
    return {
        **cell,
        "reset_ms": median(resets) * 1e3,
        "step_ms": median(steps) * 1e3,
        "step_p99_ms": _slowest(steps),
        "score_ms": median(scores) * 1e3,
        "score_p99_ms": _slowest(scores),
        "package_construction_ms": median(_seconds(_package(domain)) for _ in range(3)) * 1e3,
        f"live_{len(live)}_mb": rise / 1e6,
    }


BARS = (
    (("telecom",), "reset, median ms", "reset_ms", 2.0),
    (("retail", "airline"), "reset, median ms", "reset_ms", 1.0),
    (("telecom",), "step, median ms", "step_ms", 5.0),
    (("telecom", "retail", "airline"), "score, median ms", "score_ms", 50.0),
    (("telecom",), f"{LIVE} live environments, MB", f"live_{LIVE}_mb", 100.0),
    (("airline",), f"{LIVE} live environments, MB", f"live_{LIVE}_mb", 50.0),
)


def bars(rows: list[Row]) -> list[Row]:
    """What is promised against what was measured."""
    return [
        {"bar": f"{row['domain']}: {name}", "measured": row[key], "most": most}
        for domains, name, key, most in BARS
        for row in rows
        if row["domain"] in domains and "refused" not in row
    ]


def table(rows: list[Row]) -> str:
    """Rows as text, then the bars."""
    columns = ("reset", "step", "step p99", "score", "score p99", "package's construction", f"{LIVE} live MB")
    keys = ("reset_ms", "step_ms", "step_p99_ms", "score_ms", "score_p99_ms", "package_construction_ms")
    lines = ["milliseconds  " + "  ".join(columns)]
    for row in rows:
        if "refused" in row:
            lines.append(f"{row['domain']:14}refused: {row['refused'][:90]}")
            continue
        values = [row[key] for key in (*keys, f"live_{LIVE}_mb")]
        cells = (f"{value:{len(name)}.2f}" for name, value in zip(columns, values, strict=True))
        lines.append(f"{row['domain']:14}" + "  ".join(cells))
    lines.append("")
    for bar in bars(rows):
        verdict = "met" if bar["measured"] <= bar["most"] else "MISSED"
        lines.append(f"{bar['bar']:40} {bar['measured']:8.2f}   at most {bar['most']:<6} {verdict}")
    return "\n".join(lines)


def _slowest(seconds: list[float]) -> float:
    """The 99th percentile, in milliseconds."""
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1e3


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _package(domain: str) -> Callable[[], object]:
    return importlib.import_module(f"tau2.domains.{domain}.environment").get_environment


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
