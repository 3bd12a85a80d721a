"""Any Hugging Face causal language model on `sink_attention`, unedited: `attn_implementation="sink_plan"`.

Importing this module registers two functions with transformers under that name (and under `sink_flex`, which runs
FlexAttention): the attention, and a mask function that returns a `Plan` for a padded batch (None otherwise) instead of
a dense mask. The plan of a forward pass is, in this order: the keyword argument `plan=` of the model, the 2-D attention
mask, documents told by position_ids that restart, or else one causal sequence a row.

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sink_plan")
    require_live_sinks(model)
    require_isolation(model)
    plan = Plan.from_lengths([300, 200])
    model(input_ids=ids, position_ids=torch.from_numpy(plan.position)[None], plan=plan)

Shape letters: B rows, H query heads, K key heads, T tokens of a row, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sinkflex.attention.cache import cached_attention
from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention

NAME = "sink_plan"  # a name with "flash" in it would be redirected to a kernel from the hub
FLEX_NAME = "sink_flex"  # the same on FlexAttention
LAYERS = ("full_attention", "sliding_attention")  # kinds of layers that a plan describes


def plan_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Plan | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    plan: Plan | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "pieces",
    slots: Any | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        query: [B, H, T, D].
        key: [B, K, T, D].
        value: [B, K, T, D].
        s_aux: [H] sinks of the layer.
        slots: the sampler's `SlotCache`, which holds earlier keys and values and attends in place of a plan.

    Returns:
        [B, T, H, D], and None for the weights.
    """
    where = type(module).__name__ + f" of layer {getattr(module, 'layer_idx', '?')}"
    if softcap is not None or dropout:
        raise ValueError(f"{where} wants softcap={softcap}, dropout={dropout}; sink_plan has neither, use eager")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(f"{where} owns sinks but did not pass them as s_aux; they would be lost, use eager")
    if slots is not None:
        return slots.attend(module.layer_idx, query, key, value, s_aux, scaling, sliding_window), None
    if key.shape[2] != query.shape[2]:  # a cache holds the first keys
        if plan is not None:
            raise ValueError(f"{where} has a plan for {key.shape[2]} cached keys; pass use_cache=False with a plan")
        assert not isinstance(attention_mask, Plan)
        out = cached_attention(query, key, value, s_aux, scaling, sliding_window, attention_mask)
    else:
        assert not isinstance(attention_mask, torch.Tensor)
        plan = plan or attention_mask or _plan_from_positions(query, position_ids)
        if len(plan.runs) > query.shape[0]:
            _refuse_carrying_layers(module.config if hasattr(module, "config") else None)
        out = sink_attention(query, key, value, plan, s_aux, scaling, sliding_window, backend)
    return out.transpose(1, 2), None


def plan_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **_: Any,
) -> Plan | torch.Tensor | None:
    """The mask function that transformers calls once a layer type.

    Returns:
        A plan for a padded batch, which of its keys [B, L] are real if a cache holds the first ones, None without
        padding.

    Raises:
        ValueError: if the model wants a mask that is not causal with or without a window, or its cache is not growing.
    """
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    zero, one = torch.arange(2)
    if chunked or use_vmap or (mask_function and q_length > 1 and bool(mask_function(zero, zero, zero, one))):
        kind = "in chunks" if chunked else "of its own" if use_vmap else "that sees later tokens"
        raise ValueError(
            f"{type(config).__name__} has a mask {kind}; {NAME} is causal with or without a window, use eager"
        )
    if q_offset + q_length != kv_offset + kv_length:
        found = f"{kv_length} keys from {kv_offset} for queries {q_offset} to {q_offset + q_length}"
        raise ValueError(f"a cache returns {found}; expected keys that end with the queries, as DynamicCache does")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if q_length != kv_length:
        return attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return Plan.padded(attention_mask.cpu().numpy())


def _plan_from_positions(query: torch.Tensor, position_ids: torch.Tensor | None) -> Plan:
    """Documents start where the position does not grow by one."""
    batch, _, tokens, _ = query.shape
    fresh = np.zeros((batch, tokens), dtype=bool)
    fresh[:, 0] = True
    if position_ids is not None:
        fresh[:, 1:] = (torch.diff(position_ids.expand(batch, -1)) != 1).cpu().numpy()
    return Plan.from_lengths(np.diff(np.flatnonzero(np.append(fresh, True))).tolist())


def _refuse_carrying_layers(config: Any) -> None:
    carrying = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS))
    if carrying:
        raise ValueError(
            f"{type(config).__name__} has layers of type {', '.join(carrying)}, which carry what they read from one "
            f"packed document into the next; {NAME} packs models whose layers are all {' or '.join(LAYERS)}"
        )


@torch.no_grad()
def require_isolation(model: PreTrainedModel) -> None:
    """Prove that what is packed does not see what it should not: it must equal its rows, each alone.

    Packed are a prompt with two answers and a second document, so that anything beside attention that mixes tokens
    (convolutions, linear attention, states) shows, and so does a model that takes no notice of positions.

    Raises:
        ValueError: if the logits differ.
    """
    text = model.config.get_text_config()
    _refuse_carrying_layers(text)
    plan = Plan([11] * 3 + [7] * 4 + [11] * 4 + [16] * 5)
    rows = ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 7, 8, 9, 10], [11, 12, 13, 14, 15])
    ids = (torch.arange(16, device=model.device) * 7 + 3) % text.vocab_size
    positions = torch.from_numpy(plan.position).to(model.device)
    packed = model(input_ids=ids[None], position_ids=positions[None], plan=plan, use_cache=False).logits[0]
    tolerance = min(256 * torch.finfo(packed.dtype).eps, 0.1)
    for row in rows:
        alone = model(input_ids=ids[None, row], use_cache=False).logits[0]
        if (packed[row] - alone).norm() > tolerance * alone.norm():
            raise ValueError(
                f"{type(model).__name__} computes packed documents otherwise than each alone: something beside "
                f"attention mixes tokens, or positions are not heeded; {NAME} cannot pack it"
            )


@torch.no_grad()
def require_live_sinks(model: PreTrainedModel) -> int:
    """Prove that every sink of a model takes part in its output, by moving each layer's and watching the logits.

    Returns:
        The number of layers that own sinks; 0 for a model without any.

    Raises:
        ValueError: naming the first layer whose sinks change nothing.
    """
    named = ((name, getattr(module, "sinks", None)) for name, module in model.named_modules())
    owners = {name: sinks for name, sinks in named if isinstance(sinks, torch.Tensor)}
    if not owners:
        return 0
    ids = torch.arange(1, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    before = model(input_ids=ids, use_cache=False).logits
    for name, sinks in owners.items():
        kept = sinks.detach().clone()
        sinks.data += 2.0
        moved = not torch.equal(model(input_ids=ids, use_cache=False).logits, before)
        sinks.data.copy_(kept)
        if not moved:
            backend = model.config._attn_implementation
            raise ValueError(
                f"the sinks of {name} change no logit under attn_implementation={backend!r}: that back end drops them; "
                f"load the model with attn_implementation={NAME!r}"
            )
    return len(owners)


AttentionInterface.register(NAME, plan_attention)
AttentionInterface.register(FLEX_NAME, partial(plan_attention, backend="flex"))
AttentionMaskInterface.register(NAME, plan_mask)
AttentionMaskInterface.register(FLEX_NAME, plan_mask)
