"""What scoring with one more model costs, over a bare forward pass of that model on the same packed tokens.

    python benchmarks/score.py

The bare pass is given finished tensors, and ends with the logits of the wanted places. The scorer packs the rows into
prefix forests, takes the log-softmax, and puts what it finds in the places of the rows: log-probs of sampled tokens, or
of 16 candidates each, as Direct-OPD asks for. One thread; each ratio is the median over rounds in which the passes take
turns. Models: the main job's, and one of 4 layers of width 512.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

import sinkflex.attention.huggingface
import sinkflex.policy.experts  # noqa: F401
from sinkflex.attention.plan import Plan
from sinkflex.bench import packing, update
from sinkflex.config import LearnerConfig, TinyConfig
from sinkflex.learner.logprobs import sampled_nodes
from sinkflex.learner.packing import forest, micro_batches
from sinkflex.learner.scorer import Scorer
from sinkflex.policy.tiny import build_model
from sinkflex.trajectory import Row

CANDIDATES, ROUNDS, BAR = 16, 5, 1.15
BUDGET = LearnerConfig().micro_batch_tokens
MODELS = {
    "main job": (TinyConfig(), (update.GROUPS, update.MEMBERS, update.PROMPT, update.TOKENS, update.VOCABULARY)),
    "width 512": (packing.PEAK, (1, update.MEMBERS, update.PROMPT, update.TOKENS, packing.PEAK_ROWS[-1])),
}


def measure(shape: TinyConfig, rows_of: tuple[int, int, int, int, int], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return CPU seconds of the bare pass, and what the scorer's passes take of it.

    Args:
        shape: of the model.
        rows_of: groups, members, shared tokens, tokens of a row, vocabulary.
        rounds: of which the median counts.
    """
    rows, vocabulary = update.synthetic_rows(*rows_of), rows_of[-1]
    draws = np.random.default_rng(0)
    for row in rows:
        row.streams["candidates"] = draws.integers(0, vocabulary, (len(row), CANDIDATES))
    model = build_model(shape, vocabulary, seed=0)
    model.set_attn_implementation("sink_plan")
    model.set_experts_implementation("sorted_mm")
    scorer = Scorer({"policy": lambda: model}, cast(Any, None), cast(Any, None), cast(Any, None), 1.0, BUDGET)
    passes: dict[str, Callable[[], object]] = {
        "bare": bare(model, rows),
        "sampled": lambda: scorer.logprobs(rows),
        "candidates": lambda: scorer.logprobs(rows, candidates="candidates"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(1 + rounds):
        for name, run in passes.items():
            start = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - start)
    ratio = {
        name: statistics.median(t / b for t, b in zip(seconds[name][1:], seconds["bare"][1:], strict=True))
        for name in passes
    }
    tokens = sum(len(forest(part)) for part in micro_batches(rows, BUDGET))
    return {"tokens": tokens, "seconds": statistics.median(seconds["bare"][1:]), **ratio}


def bare(model: PreTrainedModel, rows: list[Row]) -> Callable[[], object]:
    """Return a call that runs the model over the packed rows, up to the logits of what was sampled."""
    given = []
    for batch in (forest(part) for part in micro_batches(rows, BUDGET)):
        inputs = {
            "input_ids": torch.from_numpy(batch.token_ids)[None],
            "position_ids": torch.from_numpy(batch.position)[None],
            "logits_to_keep": torch.from_numpy(batch.parent[np.unique(sampled_nodes(batch))]),
        }
        given.append((inputs, batch.subtree_end))

    @torch.no_grad()
    def run() -> None:
        for inputs, ends in given:
            model(**inputs, use_cache=False, plan=Plan(ends))

    return run


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the measurements as text, against the bar."""
    lines = ["model       tokens   bare pass, s   sampled tokens   16 candidates   at most"]
    for name, row in found.items():
        verdict = "met" if max(row["sampled"], row["candidates"]) <= BAR else "MISSED"
        shown = f"{row['sampled']:16.3f} {row['candidates']:15.3f} {BAR:9} {verdict}"
        lines.append(f"{name:10} {row['tokens']:7} {row['seconds']:14.2f} {shown}")
    return "\n".join(lines)


def main() -> None:
    """Measure both models."""
    torch.set_num_threads(1)
    found = {name: measure(*shape) for name, shape in MODELS.items()}
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
