"""The definition of attention with learned sinks, in float64: every back end is tested against it.

    score[i, j] = scale * q_i . k_j where i sees j, else -inf;  one more column holds the head's sink, whose value is 0
    out = softmax([score, sink]) @ [v, 0]

Quadratic in memory; for tests only. Source: openai/gpt-oss reference model (`sdpa`); SinkFlex, arXiv 2608.10357.

Shape letters: B rows, H query heads, K key heads, T tokens, D head size, N = B * T.
"""

from __future__ import annotations

import torch

from sinkflex.attention.plan import Plan


def visible(plan: Plan, window: int | None = None) -> torch.Tensor:
    """The mask as a dense [N, N] bool tensor, straight from the rule in `plan.py`."""
    end, position = torch.tensor(plan.subtree_end), torch.tensor(plan.position)
    index = torch.arange(len(plan))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
    if window is not None:
        seen &= (position[:, None] - position[None, :] < window) | (position[None, :] < plan.prefix_tokens)
    return seen


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention by its definition; arguments as in `sink.sink_attention`, computed and returned in float64.

    Tokens that see nothing output 0. `sinks` may also be [H, N], one per token, which shows each term of d_sinks.
    """
    batch, heads, tokens, size = q.shape
    flat = [x.double().transpose(1, 2).reshape(batch * tokens, -1, size).transpose(0, 1) for x in (q, k, v)]
    group = heads // k.shape[1]
    queries, keys, values = flat[0], flat[1].repeat_interleave(group, 0), flat[2].repeat_interleave(group, 0)
    scale = float(size**-0.5) if scale is None else scale
    seen = visible(plan, window)
    scores = (queries @ keys.transpose(1, 2)).mul(scale).masked_fill(~seen, -torch.inf)
    if sinks is None:
        sinks = torch.full((heads,), -torch.inf)
    column = sinks.double().reshape(heads, -1, 1).expand(-1, batch * tokens, 1)
    scores = torch.cat([scores, column], -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    out = weights[..., :-1] @ values
    return out.transpose(0, 1).reshape(batch, tokens, heads, size).transpose(1, 2)
