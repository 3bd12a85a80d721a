"""One optimizer step: rows to micro-batches to gradients to new weights. Blind to the method that made the rows.

The gradient does not depend on how rows are packed, ordered or cut into micro-batches: losses are sums over sampled
tokens divided by denominators of the whole mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinkflex.attention.plan import Plan
from sinkflex.config import LearnerConfig
from sinkflex.learner.checkpointing import checkpoint_layers
from sinkflex.learner.losses import LossInputs
from sinkflex.learner.packing import Batch, forest, micro_batches
from sinkflex.learner.vocabulary import token_scores
from sinkflex.trajectory import Row

Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]


@dataclass(slots=True)
class Needs:
    """What a loss reads besides policy log-probs."""

    entropy: bool = False
    reference: PreTrainedModel | None = None


class Learner:
    """Holds the optimizer and turns rows into weight updates.

    Args:
        model: the policy's model; its weights change in place.
        config: optimizer options.
        total_updates: optimizer updates of the whole stage, for the schedule.
        temperature: sampling temperature of the rows; log-probs are taken at it.
    """

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, total_updates: int, temperature: float) -> None:
        self.model = model
        self.config = config
        self.total_updates = total_updates
        self.temperature = temperature
        self.updates = 0
        if config.checkpoint_layers:
            checkpoint_layers(model)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        plain = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
        )

    def update(self, rows: Sequence[Row], loss: Loss, needs: Needs, count_zero_groups: bool) -> dict[str, float]:
        """Make one optimizer update from the rows of one mini-batch.

        Args:
            rows: rows of whole groups.
            loss: returns (this micro-batch's share of the loss, sums over its tokens).
            needs: what the loss reads.
            count_zero_groups: count groups whose advantages are all 0 in the denominators.

        Returns:
            loss, gradient norm, means over the sampled tokens that were computed, and how much that was.
        """
        live = {row.group_index for row in rows if np.any(row.advantages)}
        counted = rows if count_zero_groups else [row for row in rows if row.group_index in live]
        computed = counted
        if needs.reference is None and not needs.entropy:
            moving = {row.trajectory_index for row in counted if np.any(row.advantages)}
            computed = [row for row in counted if row.trajectory_index in moving]
        tokens = sum(int(row.loss_mask.sum()) for row in counted)
        trajectories = len({row.trajectory_index for row in counted})
        sums: dict[str, float] = {}
        raw = unique = 0
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train(self.config.checkpoint_layers)
        for part in micro_batches(computed, self.config.micro_batch_tokens):
            batch = forest(part)
            raw += sum(map(len, part))
            unique += len(batch)
            inputs = self.loss_inputs(batch, needs, tokens, trajectories)
            value, parts = loss(inputs)
            value.backward()
            # On the policy's own samples, minus the log-prob is an unbiased estimate of the entropy.
            parts = {"loss": value.detach(), "entropy": -inputs.policy_logprobs.detach().sum(), **parts}
            for name, amount in parts.items():
                fold = max if name.endswith("_max") else float.__add__
                sums[name] = fold(sums.get(name, 0.0), float(amount))
        self.model.eval()
        read = sum(int(row.loss_mask.sum()) for row in computed)
        means = {k: v if k == "loss" or k.endswith("_max") else v / read for k, v in sums.items()}
        return {**means, **self._apply(bool(computed)), "tokens": tokens, "row_tokens": raw, "unique_tokens": unique}

    def loss_inputs(self, batch: Batch, needs: Needs, tokens: int, trajectories: int) -> LossInputs:
        """Run the model over a batch and gather what losses see, [N] over all sampled tokens of its rows."""
        device = self.model.device
        rows = batch.rows
        nodes = np.concatenate([index[row.loss_mask] for row, index in zip(rows, batch.node_index, strict=True)])
        trajectory = np.concatenate([np.full(row.loss_mask.sum(), row.trajectory_index) for row in rows])
        lengths: dict[int, int] = {}
        for row in rows:
            lengths[row.trajectory_index] = lengths.get(row.trajectory_index, 0) + int(row.loss_mask.sum())
        policy, entropy = node_logprobs(self.model, batch, nodes, self.temperature, needs.entropy)
        reference = None
        if needs.reference is not None:
            with torch.no_grad():
                reference, _ = node_logprobs(needs.reference, batch, nodes, self.temperature, False)

        def flat(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate([getattr(row, name)[row.loss_mask] for row in rows])).to(device)

        return LossInputs(
            policy_logprobs=policy,
            behavior_logprobs=flat("behavior_logprobs"),
            advantages=flat("advantages"),
            trajectory=torch.from_numpy(trajectory).to(device),
            trajectory_tokens=torch.tensor([lengths[i] for i in trajectory.tolist()], device=device),
            tokens=tokens,
            trajectories=trajectories,
            entropy=entropy,
            reference_logprobs=reference,
        )

    def learning_rate(self) -> float:
        """Return the learning rate of the next update."""
        config, done = self.config, self.updates
        if done < config.warmup_steps:
            return config.learning_rate * (done + 1) / config.warmup_steps
        left = 1 - (done - config.warmup_steps) / max(self.total_updates - config.warmup_steps, 1)
        left = min(max(left, 0.0), 1.0)
        scale = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[config.schedule]
        return config.learning_rate * scale

    def _apply(self, any_gradient: bool) -> dict[str, float]:
        learning_rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = 0.0
        if any_gradient:
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm))
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient is not finite at update {self.updates}; lower the learning rate"
                )
            self.optimizer.step()
        self.updates += 1
        return {"gradient_norm": norm, "learning_rate": learning_rate}


def node_logprobs(
    model: PreTrainedModel, batch: Batch, nodes: np.ndarray, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log p(token[n] | path to parent[n]) for the given nodes, and the entropy of those distributions.

    Args:
        model: a causal LM whose attention is `sink_plan`.
        batch: the forest.
        nodes: [N] node of each wanted token; none is a root. A node may occur more than once.
        temperature: logits are divided by it.
        entropy: also return entropies.

    Returns:
        [N] float32 log-probs, and [N] entropies or None.
    """
    device = model.device
    nodes, which = np.unique(nodes, return_inverse=True)
    parents = torch.from_numpy(batch.parent[nodes]).to(device)
    assert int(parents.min()) >= 0, "a root has no log-prob"
    inputs = {
        "input_ids": torch.from_numpy(batch.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(batch.position)[None].to(device),
        "use_cache": False,
        "plan": Plan(batch.subtree_end),
    }
    targets = torch.from_numpy(batch.token_ids[nodes]).to(device)
    if plain_head(model):
        hidden = model.base_model(**inputs).last_hidden_state[0, parents]
        scores = token_scores(hidden, model.get_output_embeddings().weight, targets, None, entropy, temperature)
        chosen, entropies = scores.logprobs, scores.entropy
    else:
        logprobs = torch.log_softmax(model(**inputs, logits_to_keep=parents).logits[0].float() / temperature, dim=-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else None
    place = torch.from_numpy(which).to(device)
    return chosen[place], None if entropies is None else entropies[place]


@cache
def plain_head(model: PreTrainedModel) -> bool:
    """Return True if the logits are the output layer's weight times the last hidden state, and nothing else.

    Then they need not exist all at once. Models that scale, cap or shift their logits keep their own way.
    """
    with torch.no_grad():
        ids = torch.arange(2, 6, device=model.device)[None]
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        return torch.allclose(hidden @ model.get_output_embeddings().weight.T, logits, rtol=1e-4, atol=1e-5)
