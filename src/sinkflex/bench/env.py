"""`sinkflex bench env`: what an environment costs, beside the package's own environment class.

    reset    start an episode on a random task of the split, and what the package needs for a new world
    step     one agent turn, user included, of a scripted agent that works (telecom) or asks politely (elsewhere)
    live     resident memory of many environments in mid-episode

Each domain runs in a process of its own, on one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from sinkflex.bench.cell import Row, in_own_process, status_bytes

DOMAINS = ("telecom", "mock")
LIVE = 256


def run(domains: tuple[str, ...] = DOMAINS) -> list[Row]:
    """Measure each domain."""
    return [in_own_process(__name__, {"domain": domain}) for domain in domains]


def measure(cell: Row) -> Row:
    """Measure one domain in this process: milliseconds (median) and megabytes."""
    from sinkflex.envs.tau2.env import Tau2Env
    from sinkflex.envs.tau2.tasks import load
    from sinkflex.policy.sweep import SweepAgent
    from sinkflex.tasks.floors import DoNothing

    domain = cell["domain"]
    split = "base" if domain == "mock" else "train"
    tasks = [task.task_id for task in load(domain, split)]
    env = Tau2Env(domain=domain, split=split)
    agent: Any = SweepAgent(0) if domain == "telecom" else DoNothing()
    resets, steps = [], []
    for number, task_id in enumerate(tasks * 2):
        options = {"task_id": task_id}
        resets.append(_seconds(lambda options=options, number=number: env.reset(seed=number, options=options)))
        messages = list(env.reset(seed=number, options=options)[0])
        agent.reset(number)
        ended = False
        while not ended:
            action = agent.act(messages)
            started = time.perf_counter()
            observation, _, terminated, truncated, _ = env.step(action)
            steps.append(time.perf_counter() - started)
            messages += observation
            ended = terminated or truncated
    before = status_bytes("VmRSS")
    live = [Tau2Env(domain=domain, split=split) for _ in range(LIVE)]
    for number, one in enumerate(live):
        observation, _ = one.reset(seed=number)
        agent.reset(number)
        one.step(agent.act(list(observation)))
    rise = status_bytes("VmRSS") - before
    return {
        **cell,
        "reset_ms": median(resets) * 1e3,
        "step_ms": median(steps) * 1e3,
        "step_p99_ms": sorted(steps)[int(len(steps) * 0.99)] * 1e3,
        "package_construction_ms": median(_seconds(_package(domain)) for _ in range(7)) * 1e3,
        f"live_{LIVE}_mb": rise / 1e6,
    }


def bars(rows: list[Row]) -> list[Row]:
    """What is promised for telecom against what was measured."""
    return [
        {"bar": name, "measured": row[key], "most": most}
        for row in rows
        if row["domain"] == "telecom" and "refused" not in row
        for name, key, most in (
            ("reset, median ms", "reset_ms", 2.0),
            ("step, median ms", "step_ms", 5.0),
            (f"{LIVE} live environments, MB", f"live_{LIVE}_mb", 100.0),
        )
    ]


def table(rows: list[Row]) -> str:
    """Rows as text, then the bars."""
    lines = ["domain    reset ms   step ms   step p99 ms   package's construction ms   256 live MB"]
    for row in rows:
        if "refused" in row:
            lines.append(f"{row['domain']:9} refused: {row['refused'][:90]}")
            continue
        lines.append(
            f"{row['domain']:9} {row['reset_ms']:8.2f} {row['step_ms']:9.2f} {row['step_p99_ms']:13.2f} "
            f"{row['package_construction_ms']:27.1f} {row[f'live_{LIVE}_mb']:13.1f}"
        )
    lines.append("")
    for bar in bars(rows):
        verdict = "met" if bar["measured"] <= bar["most"] else "MISSED"
        lines.append(f"{bar['bar']:40} {bar['measured']:8.2f}   at most {bar['most']:<6} {verdict}")
    return "\n".join(lines)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _package(domain: str) -> Callable[[], object]:
    if domain == "telecom":
        from tau2.domains.telecom.environment import get_environment
    else:
        from tau2.domains.mock.environment import get_environment
    return get_environment


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
