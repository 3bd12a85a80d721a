"""Attention: sinks that live and learn, windows of the size they claim, rows that do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sinkflex.attention.huggingface import require_live_sinks
from sinkflex.checks.subject import Broken, Subject
from sinkflex.learner.logprobs import node_logprobs, row_logprobs, sampled_nodes
from sinkflex.learner.packing import forest
from sinkflex.policy.lora import rank_of

LARGEST = 1e-3  # difference of log-probs in float32, in nats


def sinks(subject: Subject) -> str:
    """Moving a sink moves the logits, and every sink receives gradient."""
    model = subject.run.policy.model
    layers = require_live_sinks(model)
    if not layers:
        return "the model has none"
    if rank_of(model):
        return f"live in {layers} layers, frozen like all weights beside the adapters"
    gradients = {name: x for name, x in subject.gradient.items() if name.endswith("sinks")}
    dead = [name for name, x in gradients.items() if not bool(x.all())]
    if dead or len(gradients) != layers:
        where = dead[0] if dead else "some layers"
        raise Broken(
            f"the sinks of {where} receive no gradient",
            'Leave the attention as it is loaded ("sink_plan"), and do not freeze the sinks.',
        )
    return f"live in {layers} layers, with gradient in each head"


def window(subject: Subject) -> str:
    """A layer with window w sees w tokens, itself included; the others see all."""
    model, limit = subject.run.policy.model, subject.run.config.rollout.max_tokens
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]
    windows = {m: getattr(m, "sliding_window", None) for m in modules}
    sizes = sorted({w for w in windows.values() if w and w < limit})
    if not sizes:
        return f"no layer has a window below rollout.max_tokens = {limit}"
    tokens = sizes[-1] + 4
    for module, reach in _reach(model, modules, tokens).items():
        expected = min(windows[module] or tokens, tokens)
        if reach != expected:
            raise Broken(
                f"layer {module.layer_idx}: the last of {tokens} tokens sees {reach}, expected {expected}",
                "Keep the attention of the model as sinkflex loads it; sliding_window of its config.json counts the "
                "token itself.",
            )
    return f"windows of {', '.join(map(str, sizes))} tokens in {sum(w in sizes for w in windows.values())} layers"


def _reach(model: Any, modules: list[Any], tokens: int) -> dict[Any, int]:
    """For each attention layer: how far back the last token's output depends on the layer's input."""
    seen: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen[module] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0])

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(tokens, device=model.device)[None] * 7 % vocabulary
    try:
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    reach = {}
    for module, (given, out) in seen.items():
        (gradient,) = torch.autograd.grad(out[0, -1].square().sum(), given, retain_graph=True)
        used = gradient[0].abs().amax(-1) > 0
        reach[module] = tokens - int(used.nonzero()[0])
    return reach


def packing(subject: Subject) -> str:
    """A row has the same log-probs alone and packed with the others."""
    run, rows = subject.run, subject.rows
    packed = row_logprobs(run.policy.model, rows, run.learner.temperature, 10**9)
    alone = []
    for row in rows:
        batch = forest([row])
        with torch.no_grad():
            found = node_logprobs(run.policy.model, batch, sampled_nodes(batch), run.learner.temperature).logprobs
        alone.append(found.cpu().numpy())
    gap = max(float(np.abs(x[row.loss_mask] - y).max()) for x, y, row in zip(packed, alone, rows, strict=True))
    if not gap <= LARGEST:
        raise Broken(
            f"log-probs of packed rows are off by up to {gap:.1e}",
            "The model mixes rows of a batch: leave its attention as it is loaded, and use no model whose layers read "
            "other tokens beside attention (convolutions, recurrent states).",
        )
    return f"{len(rows)} rows, {len(forest(rows))} of {sum(map(len, rows))} tokens computed, gap at most {gap:.1e}"


@torch.no_grad()
def padding(subject: Subject) -> str:
    """Left-padded, right-padded and lone rows have equal logits at real tokens."""
    model = subject.run.policy.model
    first, second = (torch.from_numpy(row.token_ids[:n]) for row, n in zip(subject.rows, (48, 31), strict=False))
    alone = [model(input_ids=x[None].to(model.device), use_cache=False).logits[0] for x in (first, second)]
    gaps = []
    for left in (True, False):
        pad = torch.zeros(len(first) - len(second), dtype=torch.long)
        ids = torch.stack([first, torch.cat([pad, second] if left else [second, pad])]).to(model.device)
        real = torch.ones_like(ids)
        real[1, slice(0, len(pad)) if left else slice(len(second), None)] = 0
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=real, position_ids=positions, use_cache=False).logits
        gaps += [float((logits[i][real[i].bool()] - x).abs().max()) for i, x in enumerate(alone)]
    scale = max(float(x.abs().max()) for x in alone)
    if not max(gaps) <= LARGEST * max(scale, 1):
        raise Broken(
            f"logits of padded rows are off by up to {max(gaps):.1e}",
            "Training uses no padding, but other tools would see another model: leave its attention as it is loaded.",
        )
    return f"gap of logits at most {max(gaps):.1e}, left and right"
