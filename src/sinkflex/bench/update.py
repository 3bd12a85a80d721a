"""`sinkflex bench update`: one learner update of the main job's policy, eager attention against ours, one thread.

The policy is the tiny one of `recipes/telecom_cpu.toml` (4 layers, window 64 and all keys in turn, 1.3 million
parameters), the rows are synthetic: groups of 8 with one prompt, about 1000 tokens each, half of them sampled.

    eager, rows alone        the most that eager can do: packed, one row would see the other
    sink_plan, rows alone    the same work
    sink_plan, forest        as the main job runs: micro-batches in which each shared token is computed once
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkflex.bench.cell import Row as Cell
from sinkflex.bench.cell import cpu_seconds, in_own_process, peak_rise
from sinkflex.config import LearnerConfig, TinyConfig
from sinkflex.learner.losses import LossInputs, Sums, aggregate, clipped_surrogate
from sinkflex.learner.step import Learner, Loss, Needs
from sinkflex.trajectory import Row

VOCABULARY, PROMPT, TOKENS, GROUPS, MEMBERS = 1536, 300, 1000, 2, 8
CELLS: list[Cell] = [
    {"attention": "eager", "rows": "alone"},
    {"attention": "sink_plan", "rows": "alone"},
    {"attention": "sink_plan", "rows": "forest"},
]


def run() -> list[Cell]:
    """Measure each cell."""
    return [in_own_process(__name__, cell) for cell in CELLS]


def table(cells: list[Cell]) -> str:
    """Cells as text, with the ratio to the first."""
    lines = ["attention  rows      CPU s  peak MB  gradient norm  over eager"]
    for cell in cells:
        ratio = cells[0]["seconds"] / cell["seconds"]
        shown = f"{cell['seconds']:7.2f} {(cell['peak_bytes'] or 0) / 1e6:8.0f} {cell['gradient_norm']:14.6f}"
        lines.append(f"{cell['attention']:10} {cell['rows']:6} {shown} {ratio:11.2f}")
    return "\n".join(lines)


def measure(cell: Cell) -> Cell:
    """Run one cell in this process."""
    import sinkflex.attention.huggingface
    import sinkflex.policy.experts  # noqa: F401
    from sinkflex.policy.tiny import build_model

    torch.set_num_threads(1)
    model = build_model(TinyConfig(), VOCABULARY, seed=0)
    model.set_attn_implementation(cell["attention"])
    model.set_experts_implementation("sorted_mm")
    budget = LearnerConfig().micro_batch_tokens if cell["rows"] == "forest" else 1
    return measured(model, synthetic_rows(GROUPS, MEMBERS, PROMPT, TOKENS, VOCABULARY), budget, _loss)


def measured(model: PreTrainedModel, rows: list[Row], budget: int, loss: Loss) -> Cell:
    """Return peak memory, CPU seconds and gradient norm of an update; the weights stay where they are."""
    options = LearnerConfig(micro_batch_tokens=budget, checkpoint_layers=False, learning_rate=1e-9)
    learner, norms = Learner(model, options, 1, 1.0), []

    def update() -> None:
        norms.append(learner.update(rows, loss, Needs(), False)["gradient_norm"])

    update()
    return {"peak_bytes": peak_rise(update), "seconds": cpu_seconds(update, 3), "gradient_norm": norms[0]}


def synthetic_rows(groups: int, members: int, prompt: int, tokens: int, vocabulary: int) -> list[Row]:
    """Rows of whole groups: one prompt a group, then stretches of 20 tokens, every other one sampled."""
    draws = np.random.default_rng(0)
    rows = []
    for group in range(groups):
        shared = draws.integers(2, vocabulary, prompt)
        for member in range(members):
            ids = np.concatenate([shared, draws.integers(2, vocabulary, tokens - prompt)])
            sampled = (np.arange(tokens) >= prompt) & (np.arange(tokens) // 20 % 2 == 0)
            row = Row(
                token_ids=ids,
                loss_mask=sampled,
                behavior_logprobs=np.where(sampled, -7.0, 0).astype(np.float32),
                advantages=np.where(sampled, draws.normal(), 0).astype(np.float32),
                policy_version=np.where(sampled, 0, -1),
                turn_index=np.zeros(tokens, np.int64),
                group_index=group,
                trajectory_index=group * members + member,
            )
            rows.append(row)
    return rows


def _loss(inputs: LossInputs) -> tuple[Tensor, Sums]:
    values, sums = clipped_surrogate(inputs, 0.2, 0.28)
    return aggregate(values, inputs, "token_mean"), sums


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
