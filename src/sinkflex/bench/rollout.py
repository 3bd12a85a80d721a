"""`sinkflex bench rollout RUN`: episodes a second of a trained policy, by what the sampler remembers, one thread.

    each turn anew     the whole conversation is computed again for every turn, as an engine without a cache would
    cache              each token is computed once; siblings share prompts; one sampled id a pass
    cache and drafts   several ids a pass, where the policy says what it said before

All three sample the same episodes, with the same random numbers. The first rollout of each, which has nothing to draft
from, is left out of the time. A second part measures what a turn costs as conversations grow, with random weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinkflex.bench.cell import Row, in_own_process, status_bytes
from sinkflex.bench.chart import log_chart
from sinkflex.build import make_chat, make_env, make_sampler, set_up_torch
from sinkflex.config import TinyConfig
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.evaluate import open_policy
from sinkflex.policy.sampler import Sampler, Stream
from sinkflex.policy.tiny import build_model
from sinkflex.recipe import config_of, load_config
from sinkflex.rollout.group import Phase, rollout
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import training_tasks

WAYS = ("each turn anew", "cache", "cache and drafts")
ROUNDS = 3
EPISODES = 256  # live at once in the memory part
TURNS, REPLY, SAID, TALKS = 24, 20, 8, 32  # turns, ids of a reply, ids of a turn, conversations of the growth part


class Forgetful(Sampler):
    """A sampler that keeps nothing from one turn to the next."""

    def extend(self, stream: Stream, ids: list[int]) -> None:
        """Compute the whole conversation again."""
        stream.cached, stream.pending = [], [*stream.cached, *stream.pending]
        super().extend(stream, ids)

    def _reuse(self, stream: Stream, batch: list[Stream], found: dict[Any, Any]) -> bool:
        return True


def run(source: Path) -> list[Row]:
    """Measure each way, memory, and growth.

    Args:
        source: a run directory, for instance what `make train` leaves.
    """
    config_of(source, None, [])  # refuses what is no run
    cells: list[Row] = [{"part": "episodes", "way": way, "run": str(source)} for way in WAYS]
    cells += [{"part": "memory", "way": "cache and drafts", "run": str(source)}]
    cells += [{"part": "growth", "way": way} for way in WAYS[:2]]
    return [in_own_process(__name__, cell) for cell in cells]


def table(rows: list[Row]) -> str:
    """Rows as text, then the bars."""
    lines = ["way                episodes/s  tokens/s  environment  cached prompt  passes a turn  CPU s  over cache"]
    episodes = {row["way"]: row for row in rows if row["part"] == "episodes"}
    for way, row in episodes.items():
        if "refused" in row:
            lines.append(f"{way:18} refused: {row['refused']}")
            continue
        rate = row["episodes"] / row["seconds"]
        plain = episodes["cache"]["episodes"] / episodes["cache"]["seconds"]
        lines.append(
            f"{way:18} {rate:10.1f} {row['sampled'] / row['seconds']:9.0f} {row['environment'] / row['wall']:12.1%}"
            f" {row['copied'] / (row['copied'] + row['prefilled']):14.1%} {row['passes']:14.2f}"
            f" {row['seconds']:6.2f} {rate / plain:11.2f}"
        )
    for row in rows:
        if row["part"] == "memory" and "refused" not in row:
            verdict = "met" if row["peak_bytes"] < 3e9 else "MISSED"
            lines += ["", f"{EPISODES} live episodes: {row['peak_bytes'] / 1e9:.2f} GB   below 3 GB   {verdict}"]
    growth = {row["way"]: row["per_token"] for row in rows if row["part"] == "growth" and "per_token" in row}
    for way, per_token in growth.items():
        ratio = _turn(per_token, TURNS - 4) / _turn(per_token, 2)
        lines.append(f"turn {TURNS - 4} against turn 2, CPU time a new token: {ratio:.2f}   ({way})")
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """CPU time of a new token against the turn, as SVG."""
    series = {
        row["way"]: [(turn + 1, 1e3 * seconds) for turn, seconds in enumerate(row["per_token"])]
        for row in rows
        if row["part"] == "growth" and "per_token" in row
    }
    return log_chart("A new token of a growing conversation", "turn", "CPU ms", series)


def measure(cell: Row) -> Row:
    """Run one cell in this process."""
    torch.set_num_threads(1)
    return {"episodes": _episodes, "memory": _memory, "growth": _growth}[cell["part"]](cell)


def _episodes(cell: Row) -> Row:
    """Roll out the run's own training tasks, a step's worth of groups a round."""
    policy = _Policy(Path(cell["run"]), cell["way"])
    policy.roll_out(0)
    before = policy.work()
    wall, cpu = time.perf_counter(), time.process_time()
    groups, seconds = [], 0.0
    for step in range(1, ROUNDS + 1):
        found, facts = policy.roll_out(step)
        groups += found
        seconds += facts["environment"]
    episodes = [t for group in groups for t in group.members]
    turns = sum(len(t.turns) for t in episodes)
    work = {name: value - before[name] for name, value in policy.work().items()}
    return {
        "episodes": len(episodes),
        "seconds": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "environment": seconds,
        "passes": work.pop("passes") / turns,
        "reward": float(np.mean([t.reward or 0.0 for t in episodes])),
        **work,
    }


def _memory(cell: Row) -> Row:
    """Hold many episodes at once."""
    policy = _Policy(Path(cell["run"]), cell["way"], slots=EPISODES)
    policy.roll_out(0, groups=EPISODES // policy.config.rollout.group_size)
    return {"peak_bytes": status_bytes("VmHWM")}


class _Policy:
    """A run's policy, ready to roll out in one of the ways."""

    def __init__(self, source: Path, way: str, slots: int = 0) -> None:
        changes = ["run.threads=1", *([f"rollout.slots={slots}"] if slots else [])]
        self.config = config = load_config(source / "config.toml", changes)
        set_up_torch(config)
        policy, _ = open_policy(config, source)
        self.env = make_env(config)
        self.chat = make_chat(config, policy, self.env)
        self.sampler = make_sampler(config, policy, self.chat)
        if way == WAYS[0]:
            self.sampler.__class__ = Forgetful
        if way != WAYS[2]:
            self.sampler.drafts.limit = 0
        suite = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
        self.tasks = TaskSampler(suite, config.tasks, config.run.seed)

    def work(self) -> dict[str, int]:
        names = ("prefilled", "copied", "sampled", "rejected", "ticks", "passes")
        return {name: getattr(self.sampler, name) for name in names}

    def roll_out(self, step: int, groups: int = 0) -> tuple[list[Any], dict[str, float]]:
        config = self.config
        tasks = [draw.task_id for draw in self.tasks.draw(groups or config.rollout.groups, step)]
        phase = Phase("train", config.run.seed, step, step, config.rollout.temperature)

        def new() -> Tau2Env:
            return make_env(config)

        return rollout(tasks, config.rollout.group_size, new, self.chat, self.sampler, phase)


def _growth(cell: Row) -> Row:
    """Conversations that all grow by one reply and one turn of fixed length at a time."""
    torch.manual_seed(0)
    model = build_model(TinyConfig(), 1536, seed=0)
    model.set_attn_implementation("sink_plan")
    model.set_experts_implementation("sorted_mm")
    kind = Forgetful if cell["way"] == WAYS[0] else Sampler
    sampler = kind(model, [], slots=TALKS, max_tokens=2048, max_turn_tokens=SAID, draft_tokens=0)
    draws = np.random.default_rng(0)
    streams = [sampler.open(draws.integers(2, 1536, 60).tolist(), np.random.default_rng(i)) for i in range(TALKS)]
    per_token = []
    for _ in range(TURNS):
        cpu, done = time.process_time(), 0
        while done < TALKS:
            done += len(sampler.tick())
        per_token.append((time.process_time() - cpu) / (TALKS * (REPLY + SAID)))
        for stream in streams:
            sampler.extend(stream, draws.integers(2, 1536, REPLY).tolist())
    return {"per_token": per_token}


def _turn(per_token: list[float], turn: int) -> float:
    """Median over a turn and its neighbors, counted from 1."""
    return float(np.median(per_token[turn - 2 : turn + 1]))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
