"""Direct-OPD's options, and its arithmetic: how a shift weighs ids, how b moves (arXiv 2607.05394).

Shape letters: T tokens of a row, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sinkflex.methods.options import Options
from sinkflex.metrics import register

register("direct_opd/kl_coefficient", "weight", "b, the weight of the KL to the start of the stage")
register("direct_opd/reward", "nats", "mean of A over tokens and scored ids, whose sign moves b")
register("direct_opd/shift_mean", "nats", "mean shift of the pair over the scored ids")
register("direct_opd/shift_std", "nats", "standard deviation of the shift over the scored ids")
register("direct_opd/shift_positive", "fraction", "scored ids with a positive shift")
register("direct_opd/shift_largest", "nats", "largest absolute shift of the step")
register("direct_opd/mass", "fraction", "probability that the policy gives to the scored ids")


class DirectOPDOptions(Options):
    """Direct-OPD's options."""

    teachers: tuple[str, ...] = Field(default=(), strict=False)
    """Folders of models after RL, one a stage."""
    teacher_references: tuple[str, ...] = Field(default=(), strict=False)
    """Folders of the same models before RL."""
    stage_steps: int = Field(0, ge=0)
    """Steps of each stage but the last; 0 with one pair."""
    variant: Literal["top_k", "sampled"] = "top_k"
    """The shift of the likeliest ids, or of the drawn one."""
    k: int = Field(16, ge=1)
    """How many ids are scored."""
    center: bool = False
    """Subtract the weighted mean of the shift over the scored ids."""
    outcome_weight: float = Field(0.0, ge=0)
    """Weight of GRPO's advantages beside the shift; 0 needs no reward."""
    kl_coefficient: float = Field(2.5, ge=0)
    """b at the start of a stage; 0 leaves the KL out."""
    kl_step: float = Field(0.01, ge=0, lt=1)
    """How far b moves in a step; 0 keeps it."""
    kl_least: float = Field(0.5, ge=0)
    """Least b."""
    kl_most: float = Field(2.5, ge=0)
    """Largest b."""
    dual_clip: float = Field(3.0, ge=0)
    """Bound of the ratio where A is negative, above 1; 0 switches it off."""
    shift_limit: float = Field(0.0, ge=0)
    """The shift is held within this limit; 0 leaves it as it is."""
    shuffle_shift: bool = False
    """Control experiment: each token gets the shift of another one of its row."""

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        yield from super()._contradictions()
        pairs = len(self.teachers)
        yield (
            pairs != len(self.teacher_references),
            f"method.teachers has {pairs} folders and method.teacher_references {len(self.teacher_references)}; "
            "each model after RL needs the same one before it.",
        )
        yield (
            pairs > 1 and not self.stage_steps,
            f"method.stage_steps is 0, but there are {pairs} pairs. Type method.stage_steps = 20.",
        )


def weighted(shift: np.ndarray, logprobs: np.ndarray, center: bool) -> np.ndarray:
    """Return A = w (shift - c), with w the policy's probabilities over the K candidates made to sum to 1.

    Args:
        shift: [T, K].
        logprobs: [T, K] of the policy, over its whole vocabulary.
        center: c is the weighted mean of the shift, else 0.
    """
    w = np.exp(logprobs - logprobs.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    return w * (shift - (w * shift).sum(1, keepdims=True) if center else shift)


def next_weight(b: float, reward: float, step: float, least: float, most: float) -> float:
    """Return the weight of the KL after a step whose mean A was `reward`: up if it is positive, down if negative."""
    return float(np.clip(b * (1 + step * np.sign(reward)), least, most)) if step else b


def statistics(shifts: Sequence[np.ndarray], rewards: Sequence[np.ndarray], mass: np.ndarray) -> dict[str, float]:
    """Return what is logged of a step's shifts and rewards, [T] or [T, K] each, and of the scored mass [T]."""
    shift = np.concatenate([s.ravel() for s in shifts]) if shifts else np.zeros(1)
    return {
        "direct_opd/reward": float(np.concatenate([a.ravel() for a in rewards]).mean()) if rewards else 0.0,
        "direct_opd/shift_mean": float(shift.mean()),
        "direct_opd/shift_std": float(shift.std()),
        "direct_opd/shift_positive": float((shift > 0).mean()),
        "direct_opd/shift_largest": float(np.abs(shift).max()),
        "direct_opd/mass": float(mass.mean()) if len(mass) else 0.0,
    }
