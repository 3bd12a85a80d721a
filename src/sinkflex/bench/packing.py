"""`sinkflex bench packing`: what a prefix forest saves in an update, on real prompts, one thread.

    group   8 episodes of one task, whose prompt holds the domain's full policy and all tool schemas: each row alone
            against one forest in which every shared token is computed once. Scripted experts play them, a little
            differently each.
    peak    an update of 8,192 packed tokens with 4 layers of width 512, as a share of the machine's arithmetic

Every cell runs in a process of its own.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import Tensor

from sinkflex.bench.cell import Row as Cell
from sinkflex.bench.cell import in_own_process, peak_operations
from sinkflex.bench.update import measured, synthetic_rows
from sinkflex.config import Config, TinyConfig
from sinkflex.envs.env import Action, Message
from sinkflex.learner.losses import LossInputs, Sums, aggregate
from sinkflex.learner.packing import forest
from sinkflex.learner.rows import rows_of
from sinkflex.rollout.scripted import Agent, encode, play
from sinkflex.trajectory import Group, Row

MEMBERS = 8  # episodes of the group
GROUPS = {"telecom": (3, 0.15), "retail": (21, 0.5)}  # which train task, and how often the expert leaves something out
PEAK = TinyConfig(
    hidden=512, layers=4, heads=8, kv_heads=2, head_dim=64, intermediate=512, experts=4, max_tokens=1024, window=128
)
PEAK_ROWS = (8, 1, 0, 1024, 4096)  # groups, members, shared tokens, tokens, vocabulary
CELLS: list[Cell] = [
    *({"part": "group", "domain": domain, "rows": rows} for domain in GROUPS for rows in ("alone", "forest")),
    {"part": "peak", "rows": "forest"},
]


def run() -> list[Cell]:
    """Measure each cell."""
    return [in_own_process(__name__, cell) for cell in CELLS]


def table(cells: list[Cell]) -> str:
    """Cells as text, then the bars."""
    lines = ["domain    rows      tokens computed   CPU s   peak MB   gradient norm"]
    bars = []
    for cell in (cell for cell in cells if "refused" not in cell):
        where = f"{cell.get('domain', 'width 512'):9} {cell['rows']:8}"
        lines.append(
            f"{where} {cell['tokens']:16} {cell['seconds']:7.2f} {(cell['peak_bytes'] or 0) / 1e6:9.0f}"
            f" {cell['gradient_norm']:15.6f}"
        )
        alone = next((c for c in cells if c["rows"] == "alone" and c.get("domain") == cell.get("domain")), None)
        if cell["part"] == "peak":
            bars.append(("arithmetic of the machine's peak, width 512", cell["fraction"], 0.4))
        elif cell["rows"] == "forest" and alone is not None and "refused" not in alone:
            tokens, time = alone["tokens"] / cell["tokens"], alone["seconds"] / cell["seconds"]
            lines.append(f"{'':19}{tokens:.2f} times fewer tokens, {time:.2f} times less time")
            bars.append((f"{cell['domain']}: ratio of times by ratio of tokens", time / tokens, 0.8))
    lines += [
        f"{cell.get('domain', '')} {cell['rows']} refused: {cell['refused']}" for cell in cells if "refused" in cell
    ]
    verdicts = (
        f"{name:45} {found:6.2f}   at least {least}   {'met' if found >= least else 'MISSED'}"
        for name, found, least in bars
    )
    return "\n".join([*lines, "", *verdicts])


def measure(cell: Cell) -> Cell:
    """Run one cell in this process."""
    import sinkflex.attention.huggingface
    import sinkflex.policy.experts  # noqa: F401
    from sinkflex.policy.tiny import build_model
    from sinkflex.report.profile import weights_met

    torch.set_num_threads(1)
    group = cell["part"] == "group"
    rows, vocabulary = recorded_group(cell["domain"]) if group else (synthetic_rows(*PEAK_ROWS), PEAK_ROWS[-1])
    model = build_model(TinyConfig(max_tokens=32_768) if group else PEAK, vocabulary, seed=0)
    model.set_attn_implementation("sink_plan")
    model.set_experts_implementation("sorted_mm")
    found = measured(model, rows, 1 if cell["rows"] == "alone" else 1_000_000, _loss)
    found["tokens"] = sum(map(len, rows)) if cell["rows"] == "alone" else len(forest(rows))
    if not group:
        body, head = weights_met(model)
        operations = 6 * (body * found["tokens"] + head * sum(int(row.loss_mask.sum()) for row in rows))
        found["fraction"] = operations / found["seconds"] / peak_operations()
    return found


class _Member:
    """An expert with randomness of its own in an environment that all siblings share."""

    def __init__(self, agent: Agent, member: int) -> None:
        self._agent, self._member = agent, member

    def reset(self, seed: int) -> None:
        self._agent.reset(seed + self._member)

    def act(self, messages: list[Message]) -> Action:
        return self._agent.act(messages)


def recorded_group(domain: str) -> tuple[list[Row], int]:
    """Return the rows of a group with the full prompt, advantages drawn at random, and the size of the vocabulary."""
    from sinkflex.build import make_chat, make_env
    from sinkflex.demonstrations import corpus, expert
    from sinkflex.policy.model import new_policy
    from sinkflex.tasks.suites import scored_tasks

    number, omit = GROUPS[domain]
    config = Config.model_validate(
        {
            "env": {"domain": domain},
            "prompt": {"policy_text": "full", "tools": "full"},
            "tasks": {"split": "train"},
            "warmup": {"steps": 1, "demonstrations": 8, "repeats": 1, "omit": omit},
            "validation": {"split": "test", "extra": []},
        }
    )
    policy, env = new_policy(config, lambda: corpus(config)), make_env(config)
    chat, task = make_chat(config, policy, env), scored_tasks(domain, "train")[number].task_id
    members = [encode(play(env, _Member(expert(config), i), task, 0), chat, 32_000) for i in range(MEMBERS)]
    draws = np.random.default_rng(0)
    advantages = [np.full(t.sampled_tokens, draws.normal(), np.float32) for t in members]
    rows = rows_of([Group(task, members)], [advantages])
    for row in rows:
        row.behavior_logprobs = np.where(row.loss_mask, -7.0, 0.0).astype(np.float32)
    return rows, len(policy.tokenizer)


def _loss(inputs: LossInputs) -> tuple[Tensor, Sums]:
    # Plain policy gradient: random weights would clip nearly every token's ratio, and leave nothing to compare.
    return aggregate(-inputs.advantages * inputs.policy_logprobs, inputs, "token_mean"), {}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
