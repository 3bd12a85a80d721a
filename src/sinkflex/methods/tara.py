"""TARA: turn-aware relative advantage (ToolVerse, arXiv 2607.15660), on tau2's telecom tasks in solo.

With r[i, k] = 1 if episode i made the k-th gold call (same name, equal arguments; in any order), else 0:

    A_loc[i, k] = (r[i, k] - mean_k) / (std_k + 1e-6)                 over the siblings, 0 where all agree
    V[i, k]     = r[i, k] sum_{j >= 0} gamma^j r[i, k + 1 + j]        what comes after, if turn k itself succeeded
    A[i, k]     = A_loc[i, k] + future_weight * (V[i, k] - mean) / (std + 1e-6)

A[i, k] goes to all sampled tokens of turn k. The last turn has no future term. A turn that never happened has r = 0 and
counts in mean and std.

What we changed: tau2 has no gold call for each turn of a conversation. Turn k is the k-th gold call with what was
sampled before it since the last gold call; what follows the last one belongs to the first gold call that was missed, or
to the last if none was. Without gold calls the advantage is GRPO's.
When it fails: coverage pays a spammer. An agent that calls every tool with every argument covers all gold calls;
`precision` takes that share of r off which a turn's changing calls miss the gold calls. It is blind to what the final
state is worth: the episode's own reward enters nowhere.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sinkflex.methods.credit import shuffled, spread, standardize
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.tasks.gold import changes, gold_calls, same_call
from sinkflex.trajectory import Group, Trajectory


class TARAOptions(Options):
    """TARA's options."""

    future_weight: float = Field(0.5, ge=0)
    """Weight of what later turns achieve (lambda)."""
    gamma: float = Field(0.5, ge=0, le=1)
    """Discount of each later turn after the next one."""
    gate: bool = True
    """A failed turn earns nothing for what comes after it."""
    precision: float = Field(0.0, ge=0, le=1)
    """Share of r lost where none of a turn's changing calls are gold calls; 0 is the paper's coverage."""


class TARA(Method):
    """Advantages by turn, from the coverage of gold calls."""

    Options = TARAOptions
    options: TARAOptions
    needs_solo = True

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens."""
        if not group.valid or not gold_calls(group.valid[0].domain, group.task_id):
            return super().advantages(group)
        options = self.options
        covered = [coverage(t, options.precision) for t in group.valid]
        r = np.array([of_member for of_member, _ in covered])
        table = list(turn_advantages(r, options.future_weight, options.gamma, options.gate))
        table = shuffled(group, table) if options.shuffle_advantages else table
        return [spread(t, row[place]) for t, row, (_, place) in zip(group.valid, table, covered, strict=True)]


def turn_advantages(r: np.ndarray, future_weight: float, gamma: float, gate: bool = True) -> np.ndarray:
    """Return A [G, K] from the rewards r [G, K] of G siblings at K turns."""
    future = np.zeros(r.shape)
    for k in range(r.shape[1] - 2, -1, -1):
        future[:, k] = r[:, k + 1] + gamma * future[:, k + 1]
    return standardize(r) + future_weight * standardize(r * future if gate else future)


def coverage(trajectory: Trajectory, precision: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return r [K] of the gold calls, and for each turn of the policy the gold call [turns] it belongs to."""
    domain, gold = trajectory.domain, gold_calls(trajectory.domain, trajectory.task_id)
    r, misses, pending = np.zeros(len(gold)), 0, 0
    made, place = np.zeros(len(gold), bool), np.full(len(trajectory.turns), -1)
    for index, turn in enumerate(trajectory.turns):
        for call in turn.action.tool_calls:
            hit = next((k for k, g in enumerate(gold) if not made[k] and same_call(domain, call, g)), None)
            if hit is None:
                misses += changes(domain, call.name)
                continue
            made[hit], r[hit] = True, 1 - precision * misses / (misses + 1)
            place[pending : index + 1], pending, misses = hit, index + 1, 0
    missed = np.flatnonzero(~made)
    place[pending:] = missed[0] if len(missed) else len(gold) - 1
    return r, place
