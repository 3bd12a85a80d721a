"""One optimizer step: rows to micro-batches to gradients to new weights. Blind to the method that made the rows.

The gradient does not depend on how rows are packed, ordered or cut into micro-batches: losses are sums over sampled
tokens divided by denominators of the whole mini-batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinkflex.config import LearnerConfig
from sinkflex.learner.checkpointing import checkpoint_layers
from sinkflex.learner.logprobs import node_logprobs, row_logprobs, sampled_nodes
from sinkflex.learner.losses import Counts, LossInputs, Sums
from sinkflex.learner.packing import Batch, forest, micro_batches
from sinkflex.processes import in_threads, shares_of
from sinkflex.trajectory import Row

Loss = Callable[[LossInputs], tuple[Tensor, Sums]]
PROXIMAL = "proximal_logprobs"  # the stream of what `recompute` finds


@dataclass(slots=True)
class Needs:
    """What a loss reads besides policy log-probs.

    Attributes:
        entropy: entropies, with gradient.
        reference: the model of the reference log-probs.
        proximal: log-probs under the weights before the batch's first update.
        candidates: name of an int64 [T, K] stream of ids whose log-probs are wanted, with gradient; "" for none.
    """

    entropy: bool = False
    reference: PreTrainedModel | None = None
    proximal: bool = False
    candidates: str = ""


class Learner:
    """Holds the optimizer and turns rows into weight updates.

    Args:
        model: the policy's model; its weights change in place.
        config: optimizer options.
        total_updates: optimizer updates of the whole stage, for the schedule.
        temperature: sampling temperature of the rows; log-probs are taken at it.
        cores: threads that share the micro-batches of an update.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        total_updates: int,
        temperature: float,
        cores: int = 1,
    ) -> None:
        self.model = model
        self.config = config
        self.total_updates = total_updates
        self.temperature = temperature
        self.updates = 0
        if config.checkpoint_layers:
            checkpoint_layers(model)
        self.models = [model, *(alias(model) for _ in range(cores - 1))]
        self.needs = [Needs()]  # of the latest update, for each core
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
        counts = count(rows, count_zero_groups)
        self.optimizer.zero_grad(set_to_none=True)
        sums = self.accumulate(rows, loss, needs, counts)
        computed = sums.pop("computed", 0.0)
        sizes = {name: sums.pop(name, 0.0) for name in ("row_tokens", "unique_tokens")}
        means = {k: v if k == "loss" or k.endswith("_max") else v / computed for k, v in sums.items()}
        return {**means, **self._apply(bool(computed)), "tokens": counts.tokens, **sizes}

    def accumulate(self, rows: Sequence[Row], loss: Loss, needs: Needs, counts: Counts) -> dict[str, float]:
        """Add the gradient of some rows of a mini-batch: all of them, or the share of one rank.

        A trajectory is left out if it can move nothing: its advantages and streams are 0, and neither a reference nor
        the entropy is wanted.

        Args:
            rows: whole trajectories.
            loss, needs: as in `update`.
            counts: denominators of the whole mini-batch.

        Returns:
            Sums over the computed tokens, `computed` of them; maxima; row_tokens and unique_tokens.
        """
        if needs.reference is None and not needs.entropy:
            moving = {row.trajectory_index for row in rows if moves(row)}
            rows = [row for row in rows if row.trajectory_index in moving]
        parts = micro_batches(rows, self.config.micro_batch_tokens, len(self.models))
        sums: dict[str, float] = {}
        if not parts:
            return sums

        if needs is not self.needs[0]:
            self.needs = [needs, *(_with_own_reference(needs) for _ in self.models[1:])]

        def work(place: int, part: int) -> dict[str, float]:
            return self._accumulate(self.models[place], parts[part], loss, self.needs[place], counts)

        try:
            for model in self.models:
                model.train(self.config.checkpoint_layers)
            for found in in_threads(work, shares_of(len(parts), len(self.models))):
                _add(sums, found)
            for other in self.models[1:]:
                for weight, copied in zip(self.model.parameters(), other.parameters(), strict=True):
                    if copied.grad is not None:
                        weight.grad = copied.grad if weight.grad is None else weight.grad.add_(copied.grad)
        finally:
            for model in self.models:
                model.eval()
            for other in self.models[1:]:
                other.zero_grad()
        return sums

    def _accumulate(
        self, model: PreTrainedModel, part: Sequence[Row], loss: Loss, needs: Needs, counts: Counts
    ) -> dict[str, float]:
        """Add the gradient of a micro-batch to a model's."""
        batch = forest(part)
        inputs = self.loss_inputs(model, batch, needs, counts)
        value, of_loss = loss(inputs)
        value.backward()
        return {
            "loss": float(value.detach()),
            # On the policy's own samples, minus the log-prob is an unbiased estimate of the entropy.
            "entropy": -float(inputs.policy_logprobs.detach().sum()),
            **{name: float(amount) for name, amount in of_loss.items()},
            "computed": float(len(inputs.policy_logprobs)),
            "row_tokens": float(sum(map(len, part))),
            "unique_tokens": float(len(batch)),
        }

    def recompute(self, rows: Sequence[Row]) -> None:
        """Give rows their proximal log-probs: those of the learner's weights as they are now."""
        found = row_logprobs(self.model, rows, self.temperature, self.config.micro_batch_tokens)
        for row, values in zip(rows, found, strict=True):
            row.streams[PROXIMAL] = values

    def loss_inputs(self, model: PreTrainedModel, batch: Batch, needs: Needs, counts: Counts) -> LossInputs:
        """Run a model over a batch and gather what losses see, [N] over all sampled tokens of its rows."""
        rows = batch.rows
        nodes = sampled_nodes(batch)
        trajectory = np.concatenate([np.full(row.loss_mask.sum(), row.trajectory_index) for row in rows])
        lengths: dict[int, int] = {}
        for row in rows:
            lengths[row.trajectory_index] = lengths.get(row.trajectory_index, 0) + int(row.loss_mask.sum())

        def flat(arrays: Sequence[np.ndarray]) -> Tensor:
            sampled = [array[row.loss_mask] for row, array in zip(rows, arrays, strict=True)]
            return torch.from_numpy(np.concatenate(sampled)).to(model.device)

        assert all(row.streams.keys() == rows[0].streams.keys() for row in rows), "rows differ in their streams"
        streams = {name: flat([row.streams[name] for row in rows]) for name in rows[0].streams}
        proximal = streams.pop(PROXIMAL, None)
        candidates = streams[needs.candidates].cpu().numpy() if needs.candidates else None
        scores = node_logprobs(model, batch, nodes, self.temperature, needs.entropy, candidates)
        reference = None
        if needs.reference is not None:
            with torch.no_grad():
                reference = node_logprobs(needs.reference, batch, nodes, self.temperature).logprobs
        if needs.proximal and proximal is None:  # a batch's only update: its weights are the proximal ones
            proximal = scores.logprobs.detach()
        return LossInputs(
            policy_logprobs=scores.logprobs,
            behavior_logprobs=flat([row.behavior_logprobs for row in rows]),
            advantages=flat([row.advantages for row in rows]),
            trajectory=torch.from_numpy(trajectory).to(model.device),
            trajectory_tokens=torch.tensor([lengths[i] for i in trajectory.tolist()], device=model.device),
            **counts._asdict(),
            entropy=scores.entropy,
            reference_logprobs=reference,
            proximal_logprobs=proximal if needs.proximal else None,
            candidate_logprobs=scores.candidate_logprobs,
            streams=streams,
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


def alias(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model on the very weights of another, which has gradients and buffers of its own.

    A forward pass may write into buffers (rotary embeddings that depend on the length do), and hooks are of one model.
    """
    return copy.deepcopy(model, {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()})


def _with_own_reference(needs: Needs) -> Needs:
    """Return needs whose reference no other thread runs."""
    return needs if needs.reference is None else replace(needs, reference=alias(needs.reference))


def _add(sums: dict[str, float], found: Mapping[str, float]) -> None:
    """Add to sums, and to maxima."""
    for name, amount in found.items():
        sums[name] = (max if name.endswith("_max") else float.__add__)(sums.get(name, 0.0), amount)


def count(rows: Sequence[Row], count_zero_groups: bool) -> Counts:
    """Return the denominators of a mini-batch."""
    live = {row.group_index for row in rows if count_zero_groups or moves(row)}
    counted = [row for row in rows if row.group_index in live]
    return Counts(*_sizes(counted), *_sizes(rows))


def moves(row: Row) -> bool:
    """True if a row's advantages or the streams of a method give a loss something to work on."""
    streams = (values for name, values in row.streams.items() if name != PROXIMAL)
    return bool(np.any(row.advantages)) or any(np.any(values[row.loss_mask]) for values in streams)


def _sizes(rows: Sequence[Row]) -> tuple[int, int]:
    return sum(int(row.loss_mask.sum()) for row in rows), len({row.trajectory_index for row in rows})
