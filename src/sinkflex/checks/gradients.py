"""Gradients: those of a step do not depend on how its rows are laid out, shared out, or interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sinkflex.checks.subject import Broken, Subject
from sinkflex.lock import free_directory
from sinkflex.run import open_run
from sinkflex.seeds import generator
from sinkflex.trajectory import Row

TOLERANCE = 1e-5  # relative, float32; equal sums in another order differ by about 1e-7 on a small model
Shares = list[list[Row]]


def micro_batches(subject: Subject) -> str:
    """One, two, four trajectories a micro-batch, or all of them."""
    return _equal(subject, {f"{n} a micro-batch": _pieces(subject.rows, n) for n in (1, 2, 4)}, _DENOMINATORS)


def order(subject: Subject) -> str:
    """Rows in another order."""
    places = generator(0, "check", "order").permutation(len(subject.rows)).tolist()
    layouts = {"shuffled": [[subject.rows[i] for i in places]], "backwards": [subject.rows[::-1]]}
    return _equal(subject, layouts, "A loss of your own reads the order of rows: let it use `trajectory` alone.")


def resplit(subject: Subject) -> str:
    """An episode cut into two rows, each training half of its sampled ids."""
    halves = [half for row in subject.rows for half in _halves(row)]
    return _equal(subject, {f"{len(subject.rows)} rows as {len(halves)}": [halves]}, _DENOMINATORS)


def ranks(subject: Subject) -> str:
    """Two and four ranks that compute a share each and add their gradients."""
    trajectories = _pieces(subject.rows, 1)
    layouts = {
        f"{n} ranks": [[row for piece in trajectories[rank::n] for row in piece] for rank in range(n)] for n in (2, 4)
    }
    return _equal(subject, layouts, _DENOMINATORS)


def resume(subject: Subject) -> str:
    """A second update after a checkpoint gives the same weights, to the bit, as one without the stop. Moves weights."""

    def update(of: Subject) -> None:
        learner, method = of.run.learner, of.run.method
        learner.update(subject.rows, method.loss, subject.needs, method.options.count_zero_groups)

    update(subject)
    subject.run.step = 1
    subject.run.save()
    update(subject)
    free_directory(subject.run.lock)
    with open_run(subject.run.config) as again:
        update(Subject(again, subject.groups))
        pairs = zip(subject.run.policy.model.named_parameters(), again.policy.model.parameters(), strict=True)
        changed = [name for (name, a), b in pairs if not torch.equal(a, b)]
    if changed:
        raise Broken(
            f"after a resume {len(changed)} tensors differ, first {changed[0]}",
            "Set run.deterministic = true; a method with state must return all of it from state_dict.",
        )
    return "weights are equal to the bit"


_DENOMINATORS = (
    "A loss of your own divides by what is in its micro-batch: divide by the counts in LossInputs, with `aggregate`."
)


def _equal(subject: Subject, layouts: dict[str, Shares], remedy: str) -> str:
    found = {name: subject.difference(shares) for name, shares in layouts.items()}
    said = ", ".join(f"{name} {difference:.1e}" for name, difference in found.items())
    if not max(found.values()) <= TOLERANCE:
        raise Broken(f"relative difference of the gradient: {said}", remedy)
    return said


def _pieces(rows: Sequence[Row], size: int) -> Shares:
    """Cut rows into pieces of so many trajectories."""
    indices = sorted({row.trajectory_index for row in rows})
    pieces = [set(indices[i : i + size]) for i in range(0, len(indices), size)]
    return [[row for row in rows if row.trajectory_index in piece] for piece in pieces]


def _halves(row: Row) -> list[Row]:
    half = row.loss_mask & (np.cumsum(row.loss_mask) % 2 == 0)
    masks = [mask for mask in (half, row.loss_mask & ~half) if mask.any()]
    return [replace(row, loss_mask=mask, advantages=np.where(mask, row.advantages, 0)) for mask in masks]
