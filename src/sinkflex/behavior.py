"""How an agent acts, read off its trajectories: it inspects first, recovers, verifies before it is done, goes in loops.

Each feature is computed from the log by a rule, without a judge. Whether it goes with success is its AUC: the chance
that a solved episode has more of it than another one, 0.5 if it tells nothing (after River, arXiv 2608.22631).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkflex.seeds import generator
from sinkflex.tasks.gold import changes, reads
from sinkflex.trajectory import Outcome, Trajectory, Turn

BEHAVIORS = {
    "inspect_first": "the first call reads, it does not change anything",
    "recovery": "an error is followed by another action than the one that failed",
    "verify": "something is read after the last change",
    "loops": "share of turns that repeat an earlier command and its output",
}
SIMILAR = 0.8


def behavior(trajectory: Trajectory) -> dict[str, float]:
    """Return the features of an episode that are defined for it; see BEHAVIORS."""
    turns, domain = trajectory.turns, trajectory.domain
    calls = [call.name for turn in turns for call in turn.action.tool_calls]
    writes = [i for i, name in enumerate(calls) if changes(domain, name)]
    failed = [k for k, turn in enumerate(turns[:-1]) if any(m.error for m in turn.observation)]
    repeats = repeated(turns)
    found: dict[str, float] = {"loops": float(repeats.mean()) if len(turns) else 0.0}
    if calls:
        found["inspect_first"] = float(0 not in writes)
    if writes:
        found["verify"] = float(any(reads(domain, name) for name in calls[writes[-1] + 1 :]))
    if failed:
        found["recovery"] = float(np.mean([command(turns[k]) != command(turns[k + 1]) for k in failed]))
    return found


def repeated(turns: Sequence[Turn], grams: bool = False, threshold: float = SIMILAR) -> np.ndarray:
    """Return [K] bool: a turn is like an earlier one in what was done and in what came back."""
    texts = [(parts(command(turn), grams), parts(output(turn), grams)) for turn in turns]
    return np.array(
        [
            any(jaccard(did, other) > threshold and jaccard(got, back) > threshold for other, back in texts[:k])
            for k, (did, got) in enumerate(texts)
        ],
        bool,
    )


def command(turn: Turn) -> str:
    """Return what was done in a turn as text."""
    action = turn.executed or turn.action
    calls = (f"{call.name} {json.dumps(dict(call.arguments), sort_keys=True)}" for call in action.tool_calls)
    return " ".join(calls) or action.text or action.error or ""


def output(turn: Turn) -> str:
    """Return what came back as text."""
    return "\n".join(message.content for message in turn.observation)


def parts(text: str, grams: bool = False) -> frozenset[str]:
    """Return the lower-case words of a text, or its 3-grams of characters."""
    text = text.lower()
    return frozenset(text[i : i + 3] for i in range(max(len(text) - 2, 1))) if grams else frozenset(text.split())


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """Return |a and b| / |a or b|; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


def area_under_curve(values: Sequence[float] | np.ndarray, positive: Sequence[bool] | np.ndarray) -> float | None:
    """Return the AUC: the chance that a positive case has the larger value, ties counting half; None without both."""
    numbers, labels = np.asarray(values, np.float64), np.asarray(positive, bool)
    high, low = numbers[labels], numbers[~labels]
    if not len(high) or not len(low):
        return None
    return float(np.mean((high[:, None] > low) + 0.5 * (high[:, None] == low)))


def report(trajectories: Sequence[Trajectory], folds: int = 5) -> dict[str, Any]:
    """Return mean and AUC for success of each feature, and the AUC of all of them together.

    The last is that of a logistic fit, each fold of the episodes judged by a fit to the others. Features that are not
    defined for an episode count as the mean.
    """
    valid = [t for t in trajectories if t.valid]
    solved = np.array([t.outcome is Outcome.SOLVED for t in valid])
    table = [behavior(t) for t in valid]
    result: dict[str, Any] = {"episodes": len(valid), "solved": int(solved.sum())}
    columns = []
    for name in BEHAVIORS:
        defined = [i for i, row in enumerate(table) if name in row]
        values = np.array([table[i][name] for i in defined])
        if len(values):
            result[name] = {"mean": float(values.mean()), "n": len(values)}
            result[name]["auc"] = area_under_curve(values, solved[defined])
            column = np.full(len(valid), values.mean())
            column[defined] = values
            columns.append(column)
    if columns and 0 < solved.sum() < len(valid) and len(valid) >= 2 * folds:
        result["together_auc"] = area_under_curve(_held_out_fit(np.stack(columns, 1), solved, folds), solved)
    return result


def _held_out_fit(features: np.ndarray, labels: np.ndarray, folds: int) -> np.ndarray:
    """Return for each case the logit of a ridge logistic fit (Newton's method) to the other folds."""
    order = generator(0, "folds").permutation(len(labels))
    scaled = (features - features.mean(0)) / (features.std(0) + 1e-9)
    design = np.concatenate([scaled, np.ones((len(labels), 1))], 1)
    logits = np.zeros(len(labels))
    for held_out in np.array_split(order, folds):
        kept = np.setdiff1d(order, held_out)
        x, y, weights = design[kept], labels[kept], np.zeros(design.shape[1])
        for _ in range(20):
            p = 1 / (1 + np.exp(-(x @ weights)))
            hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(weights))
            weights -= np.linalg.solve(hessian, x.T @ (p - y) + weights)
        logits[held_out] = design[held_out] @ weights
    return logits
