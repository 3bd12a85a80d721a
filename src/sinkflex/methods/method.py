"""What a method is: hooks over one loop. The defaults are plain GRPO; a method overrides what its paper changes."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from sinkflex.config import Section
from sinkflex.learner.losses import LossInputs, aggregate, clipped_surrogate, kl_k3
from sinkflex.recipe import did_you_mean, parse_section
from sinkflex.seeds import generator
from sinkflex.trajectory import Group

METHODS: dict[str, str] = {
    "grpo": "sinkflex.methods.grpo:GRPO",
}


class Options(Section):
    """Options every method understands (the rest of `[method]`)."""

    advantage_scale: Literal["std", "none"] = "std"
    """Divide group-centered rewards by their standard deviation (GRPO) or not (Dr.GRPO)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How per-token losses become one number."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference); the reference is the policy after the warm start."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    count_zero_groups: bool = False
    """Count trajectories and tokens of groups without reward variance in the loss denominators."""
    shuffle_advantages: bool = False
    """Control experiment: shuffle rewards among the members of each group, which must remove all learning."""


class Method:
    """Plain GRPO, and the hooks another method overrides."""

    Options: ClassVar[type[Options]] = Options

    def __init__(self, options: dict[str, Any], max_tokens: int, source: str = "recipe") -> None:
        self.options = parse_section(self.Options, options, source, prefix="method")
        self.max_tokens = max_tokens

    @property
    def needs_reference(self) -> bool:
        """True if `loss` reads reference log-probs."""
        return self.options.kl_coefficient > 0

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` needs the entropy with gradient."""
        return self.options.entropy_coefficient > 0

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the float32 advantages of its sampled tokens.

        A_i = (R_i - mean) / (std + 1e-6) with the sample standard deviation over the group's valid members (GRPO,
        arXiv 2402.03300). A group of one, or without variance, has advantage 0.
        """
        rewards = np.array([t.reward for t in group.valid], np.float64)
        if self.options.shuffle_advantages and len(rewards):
            rewards = generator(group.valid[0].seed, "shuffle").permutation(rewards)
        values = np.zeros(len(rewards))
        if len(rewards) > 1 and np.ptp(rewards) > 0:
            values = rewards - rewards.mean()
            if self.options.advantage_scale == "std":
                values = values / (rewards.std(ddof=1) + 1e-6)
        return [np.full(t.sampled_tokens, a, np.float32) for t, a in zip(group.valid, values, strict=True)]

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss, and sums over its tokens for metrics."""
        options = self.options
        values, sums = clipped_surrogate(inputs, options.clip_low, options.clip_high)
        if inputs.reference_logprobs is not None:
            kl = kl_k3(inputs.policy_logprobs, inputs.reference_logprobs)
            values = values + options.kl_coefficient * kl
            sums["kl"] = kl.detach().sum()
        if inputs.entropy is not None and options.entropy_coefficient:
            values = values - options.entropy_coefficient * inputs.entropy
        loss = aggregate(values, inputs, options.aggregation, self.max_tokens)
        assert torch.isfinite(loss), "the loss is not finite"
        return loss, sums

    def after_step(self, groups: list[Group], metrics: dict[str, float]) -> None:
        """Look at a finished step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON values)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""


def build_method(name: str, options: dict[str, Any], max_tokens: int, source: str = "recipe") -> Method:
    """Return the method a recipe names: a key of METHODS, or `package.module:Class` outside this repo.

    Raises:
        ValueError: unknown name, with the nearest match.
    """
    path = METHODS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        known = ", ".join(METHODS)
        raise ValueError(f"method.name: there is no method {name!r}.{did_you_mean(name, METHODS)} Methods: {known}.")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"method.name: {path!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise ValueError(f"method.name: {path!r} is not a subclass of sinkflex.methods.method.Method")
    return cls(options, max_tokens, source)
