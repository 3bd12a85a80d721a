"""`sinkflex bench attention`: attention of one layer, transformers' eager path against `sink_plan`, one thread.

    layer    forward and backward of a full layer and of a window layer, gpt-oss's heads at 1/8 of their number
    path     what transformers' own other paths do with a model that owns sinks
    group    answers that share a prompt, packed once against repeated in full
    decode   one new token of one sequence in one layer: eager's function alone on keys that are there, and whole steps,
             storage of the new token included, on transformers' DynamicCache and on `GroupCache`

Every cell runs in a process of its own. `python -m sinkflex.bench.attention CELL` runs one cell.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sinkflex.attention.cache import GroupCache, cached_attention
from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention
from sinkflex.bench.cell import Row, cpu_seconds, in_own_process, peak_operations, peak_rise, saved_bytes
from sinkflex.bench.chart import log_chart

HEADS, KV_HEADS, SIZE, WINDOW = 8, 2, 64, 128
PATHS = ("eager", "sink_plan")
GROUPS = ((1024, 256, 8), (2048, 128, 16))  # prompt tokens, answer tokens, answers
OTHER_PATHS = ("sdpa", "flex_attention", "flash_attention_2")
DECODE = (("eager", "none"), ("eager", "DynamicCache"), ("sink_plan", "DynamicCache"), ("sink_plan", "GroupCache"))


def cells(tokens: tuple[int, ...]) -> list[Row]:
    """All cells, the cheap ones first."""
    found: list[Row] = [{"section": "path", "path": path} for path in OTHER_PATHS]
    found += [
        {"section": "decode", "path": path, "cache": cache, "tokens": n}
        for n in (1024, 4096, 16384)
        for path, cache in DECODE
    ]
    found += [
        {"section": "group", "path": path, "prompt": prompt, "answer": answer, "answers": answers}
        for prompt, answer, answers in GROUPS
        for path in ("repeated", "packed")
    ]
    return found + [
        {"section": "layer", "path": path, "tokens": n, "window": window}
        for n in tokens
        for window in (None, WINDOW)
        for path in PATHS
    ]


def run(tokens: tuple[int, ...] = (1024, 2048, 4096)) -> list[Row]:
    """Measure every cell, one after the other.

    Args:
        tokens: lengths of the layer section; eager needs 6 GB at 8192.
    """
    return [in_own_process(__name__, cell) for cell in cells(tokens)]


def bars(rows: list[Row]) -> list[Row]:
    """What is promised against what was measured."""

    def find(**wanted: object) -> Row:
        return next((row for row in rows if all(row.get(k) == v for k, v in wanted.items())), {})

    def ratio(name: str, **wanted: object) -> float | None:
        both: list[list[Any]] = [
            [find(**wanted, section="layer", path=path, window=window).get(name) for window in (None, WINDOW)]
            for path in PATHS
        ]
        return sum(both[0]) / sum(both[1]) if None not in both[0] + both[1] else None

    found: list[Row] = []
    for n, least in ((4096, 60), (8192, 120)):
        found.append(
            {"bar": f"saved bytes of both layers, {n}", "least": least, "measured": ratio("saved_bytes", tokens=n)}
        )
    found.append({"bar": "time of both layers, 4096", "least": 10, "measured": ratio("seconds", tokens=4096)})
    found.append({"bar": "peak rise of both layers, 8192", "least": 50, "measured": ratio("peak_bytes", tokens=8192)})
    full = find(section="layer", path="sink_plan", tokens=4096, window=None)
    found.append({"bar": "fraction of GEMM peak, full, 4096", "least": 0.55, "measured": full.get("gemm_fraction")})
    for (prompt, _, answers), least in zip(GROUPS, (2.5, 5), strict=True):
        pair: list[Any] = [
            find(section="group", path=path, prompt=prompt).get("seconds") for path in ("repeated", "packed")
        ]
        measured = pair[0] / pair[1] if None not in pair else None
        found.append({"bar": f"group of {answers} below {prompt} tokens", "least": least, "measured": measured})
    alone, _, _, step = (find(section="decode", path=p, cache=c, tokens=4096).get("seconds") for p, c in DECODE)
    measured = alone / step if alone and step else None
    return [*found, {"bar": "decode step, 4096 keys", "least": 20, "measured": measured}]


def table(rows: list[Row]) -> str:
    """Rows as text, ours beside eager, then the bars."""
    lines = ["section  what                     path       CPU ms   saved MB   peak MB   GEMM peak"]
    for row in rows:
        what = {
            "layer": lambda r: f"{r['tokens']} tokens, " + (f"window {r['window']}" if r["window"] else "full"),
            "decode": lambda r: f"{r['tokens']} keys, {r['cache']}",
            "group": lambda r: f"{r['prompt']} + {r['answers']} x {r['answer']}",
            "path": lambda r: "gpt-oss, 16 tokens, CPU",
        }[row["section"]](row)
        start = f"{row['section']:8} {what:24} {row['path']:10}"
        if "refused" in row:
            lines.append(f"{start} refused: {row['refused'][:90]}")
            continue
        scales = (("seconds", 1e3, "8.1f"), ("saved_bytes", 1e-6, "10.1f"), ("peak_bytes", 1e-6, "9.0f"))
        shown = [f"{row[k] * scale:{style}}" if row.get(k) is not None else " " * 7 + "-" for k, scale, style in scales]
        fraction = f"{row['gemm_fraction']:10.0%}" if row.get("gemm_fraction") else ""
        lines.append(f"{start}{' '.join(shown)} {fraction}")
    lines.append("")
    for bar in bars(rows):
        if bar["measured"] is not None:
            verdict = "met" if bar["measured"] >= bar["least"] else "MISSED"
            lines.append(f"{bar['bar']:40} {bar['measured']:8.2f}   at least {bar['least']:<6} {verdict}")
    return "\n".join(lines)


def plot(rows: list[Row]) -> str:
    """Peak memory of the layers against length, as SVG."""
    series = {
        f"{path}, {'window' if window else 'full'}": [
            (row["tokens"], row["peak_bytes"] / 1e6)
            for row in rows
            if row.get("peak_bytes") and row["section"] == "layer" and (row["path"], row["window"]) == (path, window)
        ]
        for path in PATHS
        for window in (None, WINDOW)
    }
    return log_chart("Attention of one layer, forward and backward", "tokens", "peak rise, MB", series)


def measure(cell: Row) -> Row:
    """Run one cell in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {"layer": _layer, "group": _group, "decode": _decode, "path": _path}[cell["section"]](cell)


def _leaves(tokens: int, queries: int | None = None, gradient: bool = True) -> list[Tensor]:
    """q, k, v, sinks."""
    shapes = ((HEADS, queries or tokens), (KV_HEADS, tokens), (KV_HEADS, tokens))
    leaves = [torch.randn(1, heads, n, SIZE) for heads, n in shapes]
    return [x.requires_grad_(gradient) for x in (*leaves, torch.randn(HEADS))]


def _eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None) -> Tensor:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=True)
    return eager_attention_forward(module, q, k, v, mask, SIZE**-0.5)[0].transpose(1, 2)


def _attention(path: str, leaves: list[Tensor], window: int | None) -> Tensor:
    q, k, v, sinks = leaves
    tokens = q.shape[2]
    if path == "sink_plan":
        return sink_attention(q, k, v, Plan.causal(tokens), sinks, window=window)
    index = torch.arange(tokens)
    hidden = index[None] > index[:, None]
    if window is not None:
        hidden |= index[:, None] - index[None] >= window
    return _eager(q, k, v, sinks, torch.zeros(tokens, tokens).masked_fill_(hidden, torch.finfo(torch.float32).min))


def _layer(cell: Row) -> Row:
    tokens, window, path = cell["tokens"], cell["window"], cell["path"]
    small = _leaves(128)
    _attention(path, small, window).sum().backward()  # first use of threads and workspaces
    leaves = _leaves(tokens)
    upstream = torch.randn(1, HEADS, tokens, SIZE)

    def step() -> None:
        torch.autograd.grad(_attention(path, leaves, window), leaves, upstream)

    found: Row = {"peak_bytes": peak_rise(step)}
    found["seconds"] = cpu_seconds(step, 1 if path == "eager" and tokens > 4096 else 3)
    found["saved_bytes"] = saved_bytes(lambda: _attention(path, leaves, window), leaves)
    if path == "sink_plan" and window is None:
        useful = 3.5 * 2 * tokens**2 * SIZE * HEADS  # causal: half of 4 S^2 D H, the backward counts 2.5 times
        found["gemm_fraction"] = useful / found["seconds"] / peak_operations()
    return found


def _group(cell: Row) -> Row:
    prompt, answer, answers = cell["prompt"], cell["answer"], cell["answers"]
    if cell["path"] == "repeated":
        plan = Plan.from_lengths([prompt + answer] * answers)
    else:
        ends = [prompt + answer * answers] * prompt
        ends += [prompt + answer * (1 + i) for i in range(answers) for _ in range(answer)]
        plan = Plan(ends)
    q, k, v, sinks = leaves = _leaves(len(plan))
    upstream = torch.randn(1, HEADS, len(plan), SIZE)

    def step() -> None:
        torch.autograd.grad(sink_attention(q, k, v, plan, sinks), leaves, upstream)

    return {"peak_bytes": peak_rise(step), "seconds": cpu_seconds(step, 3)}


@torch.no_grad()
def _decode(cell: Row) -> Row:
    from transformers import DynamicCache

    q, k, v, sinks = _leaves(cell["tokens"], queries=1, gradient=False)
    new_k, new_v = k[:, :, :1].clone(), v[:, :, :1].clone()
    theirs, ours = DynamicCache(), GroupCache([None], 1, KV_HEADS, SIZE, capacity=cell["tokens"] + 64)
    if cell["cache"] == "DynamicCache":
        theirs.update(k, v, 0)
    if cell["cache"] == "GroupCache":
        ours.begin(cell["tokens"])  # one sequence has no prompt to share: all tokens are its own
        queries = torch.randn(1, HEADS, cell["tokens"], SIZE)
        ours.extend(0, queries, k, v, sinks)
        ours.advance()

    def group_step() -> Tensor:
        ours.begin()
        out = ours.extend(0, q, new_k, new_v, sinks)
        ours.advance()
        return out

    step = {
        ("eager", "none"): lambda: _eager(q, k, v, sinks, None),
        ("eager", "DynamicCache"): lambda: _eager(q, *theirs.update(new_k, new_v, 0), sinks, None),
        ("sink_plan", "DynamicCache"): lambda: cached_attention(q, *theirs.update(new_k, new_v, 0), sinks),
        ("sink_plan", "GroupCache"): group_step,
    }[cell["path"], cell["cache"]]
    return {"seconds": cpu_seconds(step, 51)}


def _path(cell: Row) -> Row:
    """Run a gpt-oss model on another path of transformers; it is expected to refuse on CPU."""
    from transformers import AutoModelForCausalLM

    from sinkflex.bench.step import config_of

    model = AutoModelForCausalLM.from_config(config_of(layers=2, hidden=64), attn_implementation=cell["path"])
    return {"seconds": cpu_seconds(lambda: model(torch.arange(16)[None]).logits.sum().backward(), 1)}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
