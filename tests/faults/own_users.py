"""Users of one's own, for runs that are disturbed through them."""

from __future__ import annotations

import re
from typing import Any

from sinkflex.users.user import UserAction


class HelpfulUser:
    """Says two sentences."""

    kind = "helpful"

    def reset(self, task: Any, seed: int) -> UserAction:
        return UserAction("Create a task, please.")

    def reply(self, text: str) -> UserAction:
        return UserAction("Thank you.")

    def observe(self, results: Any) -> UserAction:
        return UserAction("Thank you.")

    def fork(self) -> HelpfulUser:
        return HelpfulUser()


class StuckUser(HelpfulUser):
    """Never comes to a start on some tasks, in C."""

    def reset(self, task: Any, seed: int) -> UserAction:
        if stuck(task.id):
            re.match(r"(a+)+$", "a" * 64 + "b")
        return super().reset(task, seed)


class HungryUser(HelpfulUser):
    """Eats all the memory there is on the same tasks."""

    def reset(self, task: Any, seed: int) -> UserAction:
        kept = [b""]
        while stuck(task.id):
            kept.append(b"x" * 10_000_000)
        return super().reset(task, seed)


def stuck(task_id: str) -> bool:
    """True for tasks on which `StuckUser` and `HungryUser` break."""
    return "impossible" in task_id or task_id.endswith("_1")
