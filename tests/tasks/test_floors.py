"""Floors: what agents without skill are paid, with a user and without."""

from __future__ import annotations

import pytest

from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.tasks.floors import floors
from sinkflex.tasks.suites import scored_tasks

# domain, split: paid to the agent that does nothing, to the one that always transfers, and to the echo.
PAID = {
    ("telecom", "train"): (0, 8, 0),
    ("telecom", "test"): (0, 12, 0),
    ("retail", "train"): (5, 5, 5),
    ("retail", "test"): (2, 2, 2),
    ("airline", "train"): (13, 13, 13),
    ("airline", "test"): (6, 6, 6),
    ("mock", "base"): (1, 2, 1),
}


@pytest.mark.parametrize("solo", [False, True])
@pytest.mark.parametrize(("domain", "split"), PAID)
def test_floors_are_what_no_skill_is_paid(domain: str, split: str, solo: bool) -> None:
    task_ids = [task.task_id for task in scored_tasks(domain, split)]
    paid = floors(lambda: Tau2Env(domain, solo=solo), task_ids)
    assert {name: sum(rewards) for name, rewards in paid.items()} == dict(
        zip(("do_nothing", "always_transfer", "echo"), PAID[domain, split], strict=True)
    )
