"""A mixture of experts that keeps little for the backward: `experts_implementation="sorted_mm"`.

Tokens are sorted by expert, and each expert is two matrix products on its own rows. For the backward only the input,
the gate and up projections and the routing are kept; the activation is computed again, one expert at a time. The gather
of expert weights per token that transformers' `batched_mm` makes (megabytes a token) never happens.

With x the rows of one expert, a its activation, w its routing weights and y = w (a W2 + b2):

    da = w (dy W2^T)        dw = rowsum((dy W2^T) * a) + dy b2        so that the output itself need not be kept

Shape letters: N tokens, k experts a token, D hidden size, E experts, F size of an expert's activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "sorted_mm"


def sorted_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls for the experts of a layer.

    Args:
        module: experts with `gate_up_proj` and `down_proj`, with or without biases.
        hidden_states: [N, D].
        top_k_index: [N, k] int64.
        top_k_weights: [N, k].

    Raises:
        ValueError: if the experts have parts that are not computed here.
    """
    unknown = [name for name in ("has_post_expert_norm", "_is_expert_parallel") if getattr(module, name, False)]
    if unknown or not module.has_gate:
        found = unknown[0] if unknown else "no gate"
        raise ValueError(f"{type(module).__name__} has {found}; {NAME} computes gated local experts, use grouped_mm")
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    weights = (module.gate_up_proj, module.down_proj)
    if not module.is_transposed:
        weights = tuple(weight.transpose(1, 2) for weight in weights)
    return _Experts.apply(hidden_states, top_k_index, top_k_weights, *weights, *biases, module._apply_gate)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        routing: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate: Any,
    ) -> Tensor:
        rows, order, spans = _sorted(index, len(up))
        gate_up = x.new_empty(len(rows), up.shape[2])
        out = torch.zeros_like(x)
        share = routing.reshape(-1).index_select(0, order)[:, None]
        for expert, part in spans:
            mine = x.index_select(0, rows[part])
            torch.mm(mine, up[expert], out=gate_up[part])
            if up_bias is not None:
                gate_up[part] += up_bias[expert]
            y = gate(gate_up[part]) @ down[expert]
            if down_bias is not None:
                y += down_bias[expert]
            out.index_add_(0, rows[part], y.mul_(share[part]).to(out.dtype))
        ctx.save_for_backward(x, index, routing, up, down, up_bias, down_bias, gate_up)
        ctx.gate = gate
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, index, routing, up, down, up_bias, down_bias, gate_up = ctx.saved_tensors
        rows, order, spans = _sorted(index, len(up))
        share = routing.reshape(-1).index_select(0, order)[:, None]
        d_x, d_share = torch.zeros_like(x), torch.zeros_like(share)
        d_up, d_down, d_up_bias, d_down_bias = (  # None for weights that are frozen, or not there
            torch.zeros_like(weight) if wanted and weight is not None else None
            for weight, wanted in zip((up, down, up_bias, down_bias), ctx.needs_input_grad[3:7], strict=True)
        )
        for expert, part in spans:
            dy = d_out.index_select(0, rows[part])
            with torch.enable_grad():
                before = gate_up[part].detach().requires_grad_()
                activation = ctx.gate(before)
            d_activation = dy @ down[expert].T
            d_share[part] = (d_activation * activation.detach()).sum(1, keepdim=True)
            if down_bias is not None:
                d_share[part] += (dy @ down_bias[expert])[:, None]
            dy *= share[part]
            if d_down_bias is not None:
                d_down_bias[expert] = dy.sum(0)
            if d_down is not None:
                torch.mm(activation.detach().T, dy, out=d_down[expert])
            (d_before,) = torch.autograd.grad(activation, before, d_activation.mul_(share[part]))
            if d_up_bias is not None:
                d_up_bias[expert] = d_before.sum(0)
            if d_up is not None:
                torch.mm(x.index_select(0, rows[part]).T, d_before, out=d_up[expert])
            d_x.index_add_(0, rows[part], d_before @ up[expert].T)
        d_routing = torch.empty_like(share).index_copy_(0, order, d_share).view_as(routing)
        return d_x, None, d_routing, d_up, d_down, d_up_bias, d_down_bias, None


def _sorted(index: Tensor, experts: int) -> tuple[Tensor, Tensor, list[tuple[int, slice]]]:
    """Tokens [N * k] in the order of their experts, that order, and the rows of each expert that has any."""
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    stops = torch.bincount(flat, minlength=experts).cumsum(0).tolist()
    spans = [(e, slice(start, stop)) for e, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))]
    return order // index.shape[1], order, [(e, part) for e, part in spans if part.start < part.stop]


ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)
