"""Every mode of the loss, and a brute force of it in plain Python that shares nothing with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

AGGREGATIONS = ("token_mean", "sequence_mean", "trajectory_sum", "constant")
SURROGATES: tuple[dict[str, object], ...] = (
    {"clip_low": 0.1, "clip_high": 0.3},
    {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
    {"clip_low": 0.3, "clip_high": 0.1, "surrogate": "cispo"},
)
CORRECTIONS: tuple[dict[str, object], ...] = (
    {},
    {"correction": "token_truncate", "correction_low": 0.8, "correction_high": 1.1},
    {"correction": "token_mask", "correction_low": 0.8, "correction_high": 1.1},
    {"correction": "trajectory_mask", "correction_low": 0.95, "correction_high": 1.1},
)
DIVERGENCES: tuple[dict[str, object], ...] = (
    {},
    *({"kl_coefficient": 0.3, "kl_estimator": name} for name in ("k1", "k2", "k3", "k3_ratio")),
)
# One mode for each way through the loss, and each aggregation with each correction, with KL and with entropy.
MODES: list[dict[str, object]] = [
    *({"aggregation": a, **c, **SURROGATES[i % 3]} for i, a in enumerate(AGGREGATIONS) for c in CORRECTIONS),
    *({**d, "entropy_coefficient": 0.1, "count_zero_groups": True} for d in DIVERGENCES),
    *({"aggregation": a, **DIVERGENCES[-1], "entropy_coefficient": 0.1} for a in AGGREGATIONS[1:]),
]
MAX_TOKENS = 7


@dataclass
class Episode:
    """One trajectory of a group: log-probs and advantage of its sampled tokens, as plain numbers."""

    group: int
    advantage: float
    policy: list[float]
    behavior: list[float]
    proximal: list[float]
    reference: list[float]


def brute_force(episodes: list[Episode], options: dict, frozen: list[Episode] | None = None) -> float:
    """The loss by its definition, token by token. What has no gradient is taken from `frozen`."""
    frozen = frozen or episodes
    live = {e.group for e in episodes if e.advantage}
    counted = [e for e in episodes if e.group in live or options.get("count_zero_groups")]
    value = 0.0
    for episode, still in zip(episodes, frozen, strict=True):
        surrogate = [_surrogate(episode, still, t, options) for t in range(len(episode.policy))]
        value += _share(surrogate, counted, options)
        if options.get("kl_coefficient"):
            kl = [options["kl_coefficient"] * _kl(episode, still, t, options) for t in range(len(episode.policy))]
            value += _share(kl, episodes, options)
    return value


def _share(values: list[float], counted: list[Episode], options: dict) -> float:
    mode = options.get("aggregation", "token_mean")
    tokens, trajectories = sum(len(e.policy) for e in counted), len(counted)
    divisor = {
        "token_mean": max(tokens, 1),
        "sequence_mean": len(values) * max(trajectories, 1),
        "trajectory_sum": max(trajectories, 1),
        "constant": max(trajectories, 1) * MAX_TOKENS,
    }[mode]
    return sum(values) / divisor


def _surrogate(e: Episode, still: Episode, t: int, options: dict) -> float:
    corrected = options.get("correction", "none") != "none"
    anchor = e.proximal if corrected else e.behavior
    low, high = 1 - options.get("clip_low", 0.2), 1 + options.get("clip_high", 0.2)
    if options.get("surrogate") == "cispo":
        ratio = math.exp(still.policy[t] - anchor[t])
        objective = min(max(ratio, low), high) * e.advantage * e.policy[t]
    else:
        ratio = math.exp(e.policy[t] - anchor[t])
        objective = min(ratio * e.advantage, min(max(ratio, low), high) * e.advantage)
        if options.get("dual_clip") and e.advantage < 0:
            objective = max(objective, options["dual_clip"] * e.advantage)
    return -objective * (_weight(e, t, options) if corrected else 1.0)


def _weight(e: Episode, t: int, options: dict) -> float:
    gaps = [p - b for p, b in zip(e.proximal, e.behavior, strict=True)]
    gap = sum(gaps) / len(gaps) if options["correction"] == "trajectory_mask" else gaps[t]
    weight = math.exp(gap)
    inside = options["correction_low"] <= weight <= options["correction_high"]
    if options["correction"] == "token_truncate":
        return min(max(weight, options["correction_low"]), options["correction_high"])
    return weight if inside else 0.0


def _kl(e: Episode, still: Episode, t: int, options: dict) -> float:
    d = e.policy[t] - e.reference[t]
    ratio = math.exp(e.policy[t] - e.behavior[t])
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": ratio * (still.policy[t] - e.reference[t]),
        "k2": d * d / 2,
        "k3": k3,
        "k3_ratio": ratio * k3,
    }[options.get("kl_estimator", "k3")]
