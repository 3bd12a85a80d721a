"""Log-probs of a model over rows: each node of a prefix forest once, from the hidden state of its parent.

Shape letters: T tokens of a row, N wanted tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from sinkflex.attention.plan import Plan
from sinkflex.learner.packing import Batch, forest, micro_batches
from sinkflex.learner.vocabulary import TokenScores, token_scores
from sinkflex.trajectory import Row


def node_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    nodes: np.ndarray,
    temperature: float,
    entropy: bool = False,
    candidates: np.ndarray | None = None,
) -> TokenScores:
    """Return log p(token[n] | path to parent[n]) for the given nodes, and what else is wanted of those distributions.

    Args:
        model: a causal LM whose attention is `sink_plan`.
        batch: the forest.
        nodes: [N] node of each wanted token; none is a root. A node may occur more than once; it is computed once.
        temperature: logits are divided by it.
        entropy: also return entropies.
        candidates: [N, K] int64, further ids to score in place of each token.

    Returns:
        float32: logprobs [N]; entropy [N] and candidate_logprobs [N, K] if wanted.
    """
    device = model.device
    wanted = nodes[:, None] if candidates is None else np.concatenate([nodes[:, None], candidates], 1)
    wanted, which = np.unique(wanted, axis=0, return_inverse=True)
    nodes = wanted[:, 0]
    parents = torch.from_numpy(batch.parent[nodes]).to(device)
    assert int(parents.min()) >= 0, "a root has no log-prob"
    inputs = {
        "input_ids": torch.from_numpy(batch.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(batch.position)[None].to(device),
        "use_cache": False,
        "plan": Plan(batch.subtree_end),
    }
    targets = torch.from_numpy(batch.token_ids[nodes]).to(device)
    others = None if candidates is None else torch.from_numpy(wanted[:, 1:]).to(device)
    if plain_head(model):
        hidden = model.base_model(**inputs).last_hidden_state[0, parents]
        head = model.get_output_embeddings()
        assert head is not None
        scores = token_scores(hidden, head.weight, targets, others, entropy, temperature)
    else:
        logprobs = torch.log_softmax(model(**inputs, logits_to_keep=parents).logits[0].float() / temperature, dim=-1)
        scores = TokenScores(
            logprobs.gather(1, targets[:, None])[:, 0],
            -(logprobs.exp() * logprobs).sum(-1) if entropy else None,
            None if others is None else logprobs.gather(1, others),
        )
    place = torch.from_numpy(which.reshape(-1)).to(device)
    entropies, others = (None if score is None else score[place] for score in scores[1:])
    return TokenScores(scores.logprobs[place], entropies, others)


@torch.no_grad()
def row_logprobs(model: PreTrainedModel, rows: Sequence[Row], temperature: float, budget: int) -> list[np.ndarray]:
    """Return a model's log-probs of the sampled tokens of rows, without gradient.

    Args:
        model: a causal LM whose attention is `sink_plan`.
        rows: rows in any order.
        temperature: logits are divided by it.
        budget: forest nodes of one forward pass.

    Returns:
        For each row [T] float32, 0 where `loss_mask` is False.
    """
    results = [np.zeros(len(row), np.float32) for row in rows]
    home = {id(row): result for row, result in zip(rows, results, strict=True)}
    for part in micro_batches([row for row in rows if row.loss_mask.any()], budget):
        batch = forest(part)
        values = node_logprobs(model, batch, sampled_nodes(batch), temperature).logprobs.cpu().numpy()
        ends = np.cumsum([row.loss_mask.sum() for row in part])
        for row, of_row in zip(part, np.split(values, ends[:-1]), strict=True):
            home[id(row)][row.loss_mask] = of_row
    return results


def sampled_nodes(batch: Batch) -> np.ndarray:
    """Return [N] the node of each sampled token, row by row."""
    return np.concatenate([index[row.loss_mask] for row, index in zip(batch.rows, batch.node_index, strict=True)])


_PLAIN: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the output layer's weight times the last hidden state, and nothing else.

    Then they need not exist all at once. Models that bias, scale, cap or shift their logits keep their own way.
    """
    if model not in _PLAIN:
        _PLAIN[model] = _has_plain_head(model)
    return _PLAIN[model]


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    """Watch what the layer is given, and whether the model returns what it says: large numbers, where a cap shows."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        return False
    ids = torch.arange(2, 6, device=model.device)[None]
    expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T
    plain = []

    def enlarge(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        plain.append(torch.allclose(expected, output, rtol=1e-4, atol=1e-5))
        return 1e4 * torch.ones_like(output).cumsum(-1)

    hook = head.register_forward_hook(enlarge)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    return plain == [True] and torch.equal(logits, 1e4 * torch.ones_like(logits).cumsum(-1))
