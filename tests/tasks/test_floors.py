from __future__ import annotations

import pytest

from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.tasks.audit import floors
from sinkflex.tasks.suites import scored_tasks


@pytest.mark.parametrize(
    ("domain", "split", "solo", "do_nothing", "always_transfer"),
    [
        ("telecom", "test", False, 0, 12),
        ("telecom", "train", False, 0, 8),
        ("telecom", "test", True, 0, 12),
        ("mock", "base", True, 1, 2),
    ],
)
def test_floors_are_what_no_skill_is_paid(
    domain: str, split: str, solo: bool, do_nothing: int, always_transfer: int
) -> None:
    task_ids = [task.task_id for task in scored_tasks(domain, split)]
    paid = floors(lambda: Tau2Env(domain=domain, solo=solo), task_ids)
    assert {name: sum(rewards) for name, rewards in paid.items()} == {
        "do_nothing": do_nothing,
        "always_transfer": always_transfer,
    }
