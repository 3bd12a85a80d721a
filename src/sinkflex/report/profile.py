"""Where the time of a step goes, and which share of the machine's arithmetic it uses: `sinkflex train --profile`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from sinkflex.bench.cell import peak_operations
from sinkflex.run import Run

PARTS = ("environment", "prefill", "decode", "score", "update")


def profile_of(run: Run) -> str:
    """Return a table of the seconds a step took, from the run's own records.

    Arithmetic counts two operations a weight that a token meets: once for what is sampled, three times for what is
    trained, once more for the reference. Products of attention scores are left out. Its peak is that of a product of
    two 2048 x 2048 float32 matrices, with the run's threads.
    """
    steps = _records(run)
    if not steps:
        return "no step of training has been recorded: raise train.steps"
    mean = {name: float(np.mean([step.get(name, 0.0) for step in steps])) for name in {k for s in steps for k in s}}
    whole = mean["timing/step_seconds"]
    seconds = {part: mean[f"timing/{part}_seconds"] for part in PARTS}
    seconds["idle, writing"] = whole - sum(seconds.values())
    lines = [f"mean of {len(steps)} steps      seconds    share"]
    lines += [f"{part:22} {value:9.3f} {value / whole:8.1%}" for part, value in seconds.items()]
    lines.append(f"{'step':22} {whole:9.3f}")
    prompts, copied = mean["rollout/prefilled_tokens"], mean["rollout/copied_tokens"]
    sampled, rejected = mean["rollout/sampled_tokens"], mean["rollout/rejected_tokens"]
    unique, rows = mean["learner/unique_tokens"], mean["learner/row_tokens"]
    body, head = weights_met(run.policy.model)
    passes = 3 + run.method.needs_reference
    rolled = 2 * (body * (prompts + sampled + rejected) + head * (sampled + rejected))
    trained = 2 * passes * (body * unique + head * mean["learner/tokens"])
    rollout, update = seconds["prefill"] + seconds["decode"], seconds["update"]
    peak = peak_operations()
    lines += [
        "",
        f"prompt tokens from the cache   {copied / max(copied + prompts, 1):8.1%}",
        f"tokens computed in vain        {rejected / max(prompts + sampled + rejected, 1):8.1%}",
        f"sampler   {(prompts + sampled + rejected) / rollout:9.0f} tokens/s   {rolled / rollout / peak:6.1%} of peak",
        f"update    {unique / max(update, 1e-9):9.0f} tokens/s   {trained / max(update, 1e-9) / peak:6.1%} of peak"
        f"   ({rows / max(unique, 1):.2f} row tokens in each)",
        f"peak      {peak / 1e9:9.1f} GFLOP/s",
    ]
    return "\n".join(lines)


def weights_met(model: PreTrainedModel) -> tuple[int, int]:
    """Return how many weights of matrices a token meets in the layers, and in the output layer.

    Of a mixture of experts, a token meets the experts it is sent to.
    """
    config: Any = model.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)  # by family
    of_experts = config.num_experts_per_tok / experts if experts else 1
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    output = model.get_output_embeddings()
    head = 0 if output is None else output.weight.numel()
    body = 0.0
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in lookups and not (output is not None and weight is output.weight):
            body += weight.numel() * (of_experts if ".experts." in name else 1)
    return int(body), head


def _records(run: Run) -> list[dict[str, float]]:
    """What the run wrote of each training step: facts of the learning and of the time, in one."""
    steps: dict[int, dict[str, float]] = {}
    for name in ("metrics.jsonl", "timing.jsonl"):
        for line in (run.directory / name).read_text().splitlines():
            record = json.loads(line)
            if record["stage"] == "train":
                del record["stage"]
                steps.setdefault(record["step"], {}).update(record)
    return [step for step in steps.values() if "timing/step_seconds" in step and "timing/decode_seconds" in step]
