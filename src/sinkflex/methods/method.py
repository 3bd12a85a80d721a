"""What a method is: hooks over one loop. The defaults are plain GRPO; a method overrides what its paper changes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkflex.learner.losses import LossInputs, aggregate, cispo, clipped_surrogate, kl_estimate, mismatch_weight
from sinkflex.methods.hooks import Invalid, RewardParts, RolloutHooks, Services
from sinkflex.methods.options import Options
from sinkflex.recipe import did_you_mean, parse_section
from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Row, Trajectory

if TYPE_CHECKING:
    from sinkflex.learner.scorer import Scorer

METHODS: dict[str, str] = {
    "grpo": "sinkflex.methods.grpo:GRPO",
    "gspo": "sinkflex.methods.gspo:GSPO",
    "stepo": "sinkflex.methods.stepo:STEPO",
    "tara": "sinkflex.methods.tara:TARA",
    "empo": "sinkflex.methods.empo:EMPO",
    "river": "sinkflex.methods.river:River",
    "direct_opd": "sinkflex.methods.direct_opd:DirectOPD",
    "seed": "sinkflex.methods.seed:SEED",
    "pats": "sinkflex.methods.pats:PATS",
    "toolsrl": "sinkflex.methods.toolsrl:ToolsRL",
}


class Method(RolloutHooks):
    """Plain GRPO, and the hooks another method overrides."""

    Options: ClassVar[type[Options]] = Options
    needs_solo: ClassVar[bool] = False
    """Credit goes by telecom's gold calls, so that the agent must own every tool."""

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        self.options = parse_section(self.Options, options, "recipe", prefix="method")
        self.max_tokens = max_tokens

    @property
    def needs_reference(self) -> bool:
        """True if `loss` reads reference log-probs."""
        return self.options.kl_coefficient > 0

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` needs the entropy with gradient."""
        return self.options.entropy_coefficient > 0

    @property
    def needs_candidates(self) -> str:
        """Name of a stream of ids, [T, K], whose log-probs `loss` reads with gradient; "" for none."""
        return ""

    async def reward(self, trajectory: Trajectory) -> RewardParts | Invalid:
        """Return the reward of a finished training episode; the environment's, unless a paper has another."""
        return RewardParts(float(trajectory.reward or 0.0), trajectory.reward_parts)

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the float32 advantages of its sampled tokens.

        A_i = (R_i - mean) / (std + 1e-6) with the sample standard deviation over the group's valid members (GRPO,
        arXiv 2402.03300); the options change mean and scale. A group of one, or without variance, has advantage 0.
        """
        options = self.options
        rewards = np.array([t.reward for t in group.valid], np.float64)
        if options.shuffle_advantages and len(rewards):
            rewards = generator(group.valid[0].seed, "shuffle").permutation(rewards)
        values = np.zeros(len(rewards))
        if len(rewards) > 1 and np.ptp(rewards) > 0:
            values = rewards - rewards.mean()
            if options.baseline == "leave_one_out":
                values *= len(rewards) / (len(rewards) - 1)
            if options.advantage_scale == "std":
                values = values / (rewards.std(ddof=1) + 1e-6)
        return [np.full(t.sampled_tokens, a, np.float32) for t, a in zip(group.valid, values, strict=True)]

    def score(self, groups: Sequence[Group], rows: Sequence[Row], scorer: Scorer) -> None:
        """Add named streams to the rows, [T] or [T, K] each, with what models say about them."""

    def rescore(self, rows: Sequence[Row], scorer: Scorer) -> None:
        """Score the rows of a mini-batch again: the weights have changed since `score`."""

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss, and sums over its tokens for metrics."""
        options = self.options
        if options.surrogate == "cispo":
            values, sums = cispo(inputs, options.clip_low, options.clip_high)
        else:
            values, sums = clipped_surrogate(inputs, options.clip_low, options.clip_high, options.dual_clip)
        if options.correction != "none":
            weight, of_weight = mismatch_weight(
                inputs, options.correction, options.correction_low, options.correction_high
            )
            values, sums = weight * values, sums | of_weight
        loss = aggregate(values, inputs, options.aggregation, self.max_tokens)
        # What follows concerns every token, also of groups without advantage, and is divided by all of them.
        if inputs.reference_logprobs is not None:
            kl = kl_estimate(inputs, options.kl_estimator)
            sums["kl"] = kl.detach().sum()
            loss = loss + options.kl_coefficient * aggregate(kl, inputs, options.aggregation, self.max_tokens, True)
        if inputs.entropy is not None:
            entropy = aggregate(inputs.entropy, inputs, options.aggregation, self.max_tokens, True)
            loss = loss - options.entropy_coefficient * entropy
        assert torch.isfinite(loss), "the loss is not finite"
        return loss, sums

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Look at a finished step; what is put into `metrics` is logged."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON values)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


def build_method(name: str, options: dict[str, Any], max_tokens: int) -> Method:
    """Return the method a recipe names, with the options it gives; raises what a `ValueError` says to change."""
    return method_class(name)(options, max_tokens)


def method_class(name: str) -> type[Method]:
    """Return a method by its key in METHODS, or by `package.module:Class` outside this repo.

    Raises:
        ValueError: unknown name, with the nearest match.
    """
    path = METHODS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        preset = name.lower() in ("dr_grpo", "dapo", "rloo", "cispo")
        hint = " It is options of grpo: Presets in docs/methods.md." if preset else did_you_mean(name, METHODS)
        raise ValueError(f"method.name: there is no method {name!r}.{hint} Methods: {', '.join(METHODS)}.")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method.name: {path!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise ValueError(f"method.name: {path!r} is not a subclass of sinkflex.methods.method.Method")
    return cls
