"""`sinkflex bench step`: a whole training step of a small gpt-oss, eager against what this package turns on.

The configuration is fixed: 8 layers (window 128 and full in turn), hidden 512, 8 query and 2 key heads of 64, 8 experts
with 2 a token, vocabulary 50257, float32, 107 million parameters, one sequence, one thread. A step is the mean negative
log-likelihood and its gradients. The peak is counted above weights and gradients, which are there before.

    attention   eager | sink_plan
    loss        whole: logits of all tokens at once | chunked: `learner.vocabulary.weighted_logprob`
    layers      kept | checkpointed (transformers' own for eager, `learner.checkpointing` for sink_plan)
    experts     grouped_mm (transformers' default) | sorted_mm (`policy.experts`)

Attention's share of the peak depends on rho = heads x tokens / vocabulary, one layer's scores against the logits: it is
1.30 for gpt-oss-20b at 4096 tokens, and here for 16 heads at 4096 tokens.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from sinkflex.bench.cell import Row, allow_memory, in_own_process, peak_rise, saved_bytes
from sinkflex.bench.chart import log_chart

EAGER: Row = {"attention": "eager", "loss": "whole", "layers": "kept", "experts": "grouped_mm"}
OURS: Row = {"attention": "sink_plan", "loss": "chunked", "layers": "checkpointed", "experts": "sorted_mm"}
STAGES: list[Row] = [
    EAGER,
    {**EAGER, "attention": "sink_plan"},
    {**EAGER, "attention": "sink_plan", "loss": "chunked"},
    {**OURS, "layers": "kept"},
    OURS,
]
BUDGET_BYTES = 2.5e9


def config_of(layers: int = 8, hidden: int = 512, heads: int = 8, vocabulary: int = 50257) -> Any:
    """The benchmark's GptOssConfig."""
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
        pad_token_id=0,
    )


def run(tokens: tuple[int, ...] = (1024, 2048), rho: bool = False, budget: bool = False) -> list[Row]:
    """Measure, one process a cell.

    Args:
        tokens: lengths for every stage from eager to ours; eager needs 10 GB at 4096.
        rho: also compare with checkpointed eager at rho = 1.30 (8 GB).
        budget: also search the longest sequence whose peak rise stays within 2.5 GB (about half an hour).
    """
    rows = [_cell(stage, n) for n in tokens for stage in STAGES]
    if rho:
        pair: list[Row] = [{**EAGER, "layers": "checkpointed"}, OURS]
        rows += [{**_cell(stage, 4096, heads=16), "section": "rho 1.30"} for stage in pair]
    if budget:
        rows += [longest(stage) for stage in (EAGER, {**EAGER, "layers": "checkpointed"}, OURS)]
    return rows


def _cell(stage: Row, tokens: int, heads: int = 8, budget: bool = False) -> Row:
    return in_own_process(__name__, {"section": "step", "tokens": tokens, "heads": heads, **stage, "budget": budget})


def longest(stage: Row) -> Row:
    """The longest sequence, in steps of an eighth of a power of two, whose peak rise stays within the budget."""
    ladder = [2**power * eighths // 8 for power in range(10, 17) for eighths in range(8, 16)]
    low, high, best = 0, len(ladder), {}
    while low < high:
        middle = (low + high) // 2
        row = _cell(stage, ladder[middle], budget=True)
        if "refused" in row and "allocate memory" not in row["refused"]:
            return {**row, "section": "longest within 2.5 GB"}  # killed, or out of time: says nothing of memory
        if "refused" not in row and row["peak_bytes"] <= BUDGET_BYTES:
            low, best = middle + 1, row
        else:
            high = middle
    return {**best, "section": "longest within 2.5 GB"}


def bars(rows: list[Row]) -> list[Row]:
    """What is promised against what was measured."""

    def find(section: str, stage: Row, **wanted: object) -> Row:
        wanted = {"section": section, **stage, **wanted}
        return next((row for row in rows if all(row.get(k) == v for k, v in wanted.items())), {})

    def less(mine: Row, theirs: Row) -> float | None:
        return (
            1 - mine["peak_bytes"] / theirs["peak_bytes"] if "peak_bytes" in mine and "peak_bytes" in theirs else None
        )

    def times(name: str, mine: Row, theirs: Row) -> float | None:
        judged = name in mine and name in theirs and "refused" not in mine and "refused" not in theirs
        return mine[name] / theirs[name] if judged else None

    eager = find("step", EAGER, tokens=4096)
    found: list[Row] = []
    for index, what, least in ((1, "attention", 0.45), (2, "and chunked loss", 0.70), (4, "and checkpointing", 0.88)):
        stage = find("step", STAGES[index], tokens=4096)
        found.append({"bar": f"less peak than eager at 4096: {what}", "least": least, "measured": less(stage, eager)})
    for index in (1, 4):
        speed = times("tokens_per_second", find("step", STAGES[index], tokens=4096), eager)
        found.append({"bar": f"tokens a second over eager at 4096, stage {index}", "least": 2.5, "measured": speed})
    pair = [find("rho 1.30", stage) for stage in (OURS, {**EAGER, "layers": "checkpointed"})]
    found.append({"bar": "less peak than checkpointed eager, rho 1.30", "least": 0.60, "measured": less(*pair)})
    pair = [find("longest within 2.5 GB", stage) for stage in (OURS, EAGER)]
    return [*found, {"bar": "longest sequence over eager's", "least": 10, "measured": times("tokens", *pair)}]


def table(rows: list[Row]) -> str:
    """Rows as text, then the bars."""
    lines = [
        "section                tokens heads attention  loss     layers        experts     peak MB  saved MB   tokens/s"
    ]
    for row in rows:
        names = f"{row['attention']:10} {row['loss']:8} {row['layers']:13} {row['experts']:10}"
        start = f"{row['section']:22} {row['tokens']:6} {row['heads']:5} {names}"
        if "refused" in row:
            lines.append(f"{start} refused: {row['refused'][:60]}")
            continue
        saved = f"{row['saved_bytes'] / 1e6:9.0f}" if "saved_bytes" in row else f"{'-':>9}"
        lines.append(f"{start} {row['peak_bytes'] / 1e6:8.0f} {saved} {row['tokens_per_second']:10.0f}")
    lines.append("")
    for bar in bars(rows):
        if bar["measured"] is not None:
            verdict = "met" if bar["measured"] >= bar["least"] else "MISSED"
            lines.append(f"{bar['bar']:48} {bar['measured']:7.2f}   at least {bar['least']:<5} {verdict}")
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """Peak memory of the stages against length, as SVG."""
    names = ("eager", "sink_plan", "+ chunked loss", "+ sorted experts", "+ checkpointing")
    series = {
        name: [
            (row["tokens"], row["peak_bytes"] / 1e6)
            for row in rows
            if row["section"] == "step" and row.get("peak_bytes") and stage.items() <= row.items()
        ]
        for name, stage in zip(names, STAGES, strict=True)
    }
    return log_chart("A training step, 8 layers, 107 million parameters", "tokens", "peak rise, MB", series)


def measure(cell: Row) -> Row:
    """Run one cell in this process."""
    from transformers import GptOssForCausalLM

    import sinkflex.attention.huggingface
    import sinkflex.policy.experts  # noqa: F401
    from sinkflex.learner.checkpointing import checkpoint_layers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = config_of(heads=cell["heads"])
    model = GptOssForCausalLM._from_config(
        config, attn_implementation=cell["attention"], experts_implementation=cell["experts"]
    ).train()
    if cell["layers"] == "checkpointed" and cell["attention"] == "eager":
        model.activation_checkpointing_enable()
    elif cell["layers"] == "checkpointed":
        checkpoint_layers(model)
    ids = torch.randint(0, config.vocab_size, (1, cell["tokens"]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _loss(model, ids[:, :256], cell["loss"]).backward()  # first use of threads and workspaces
    found: Row = {}

    def step() -> None:
        start = time.thread_time()
        value = _loss(model, ids, cell["loss"])
        value.backward()
        found.update(nll=value.item(), tokens_per_second=cell["tokens"] / (time.thread_time() - start))

    if cell["budget"]:
        allow_memory(2 * BUDGET_BYTES)  # addresses, of which a part is never touched
    found["peak_bytes"] = peak_rise(step)
    if not cell["budget"]:
        found["saved_bytes"] = saved_bytes(lambda: _loss(model, ids, cell["loss"]), model.parameters())
        if cell["layers"] == "checkpointed" and cell["attention"] == "sink_plan":  # outputs and log-sum-exps that wait
            found["saved_bytes"] += (
                4 * config.num_hidden_layers * cell["tokens"] * cell["heads"] * (config.head_dim + 1)
            )
    return found


def _loss(model: Any, ids: Tensor, kind: str) -> Tensor:
    from sinkflex.learner.vocabulary import weighted_logprob

    targets = ids[0, 1:]
    if kind == "whole":
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, targets)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    return weighted_logprob(hidden, model.lm_head.weight, targets, torch.full(targets.shape, -1.0 / len(targets)))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
