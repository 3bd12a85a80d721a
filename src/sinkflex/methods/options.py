"""The options every method has: plain GRPO and the published variants that differ from it by a term."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from sinkflex.config import Section


class Options(Section):
    """Options every method understands (the rest of `[method]`)."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its group, or of the other members alone (RLOO)."""
    advantage_scale: Literal["std", "none"] = "std"
    """Divide group-centered rewards by their standard deviation (GRPO) or not (Dr.GRPO)."""
    aggregation: Literal["token_mean", "sequence_mean", "trajectory_sum", "constant"] = "token_mean"
    """How per-token losses become one number."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """PPO's clipped ratio, or the clipped ratio as a weight of the log-prob (CISPO)."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1 does not clip below."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = Field(0.0, ge=0)
    """Bound of the ratio where the advantage is negative (dual clip), above 1; 0 switches it off."""
    correction: Literal["none", "token_truncate", "token_mask", "trajectory_mask"] = "none"
    """What is done where sampler and learner differ: the loss is weighted by recomputed / sampled probabilities."""
    correction_low: float = Field(0.5, ge=0, le=1)
    """Weights below are raised to it (token_truncate) or become 0 (the masks)."""
    correction_high: float = Field(2.0, ge=1)
    """Weights above are lowered to it (token_truncate) or become 0 (the masks)."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the estimate of KL(policy || reference); the reference is the policy after the warm start."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_ratio"] = "k3"
    """Which estimate: k1 as a cost of each token (its gradient is the reward's), the others as losses."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    count_zero_groups: bool = False
    """Count trajectories and tokens of groups without reward variance in the denominators of the surrogate."""
    shuffle_advantages: bool = False
    """Control experiment: shuffle rewards (with credit by turn, each turn's) among the members of each group, which
    must remove all learning."""

    @model_validator(mode="after")
    def _no_dead_options(self) -> Self:
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)
        return self

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yield (is it so?, text) for every option that would do nothing, or something else than it says."""
        bounds = self.model_fields_set & {"correction_low", "correction_high"}
        yield (
            self.correction == "none" and bool(bounds),
            f"method.{min(bounds, default='')} does nothing without a correction. Type method.correction = "
            '"token_truncate", "token_mask" or "trajectory_mask".',
        )
        yield (
            self.kl_coefficient == 0 and "kl_estimator" in self.model_fields_set,
            "method.kl_estimator does nothing while method.kl_coefficient is 0. Type method.kl_coefficient = 0.01.",
        )
        yield (
            0 < self.dual_clip <= 1,
            f"method.dual_clip = {self.dual_clip}, expected more than 1, or 0 for none. Type method.dual_clip = 3.",
        )
        yield (
            self.dual_clip > 0 and self.surrogate == "cispo",
            'method.dual_clip does nothing with method.surrogate = "cispo", whose weight is bounded already. '
            "Leave it out.",
        )
