"""The scripted user of tau2's mock domain: states a request, says yes to questions, then leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sinkflex.envs.env import Message
from sinkflex.users.user import UserAction, UserStop

PATIENCE = 3


@dataclass(slots=True)
class MockUser:
    """Confirms every question up to `PATIENCE` times; anything else it takes as the end."""

    kind: str = "scripted"
    request: str = ""
    questions: int = 0

    def reset(self, task: Any, seed: int) -> UserAction:
        """Say what the task asks for; the seed has nothing to vary."""
        self.request = task.ticket or str(task.user_scenario.instructions)
        self.questions = 0
        return UserAction(text=self.request)

    def reply(self, text: str) -> UserAction:
        """Confirm a question and repeat the request, or leave."""
        self.questions += 1
        if "?" in text and self.questions <= PATIENCE:
            return UserAction(text=f"Yes, please. {self.request}")
        return UserAction(text="Thank you, that is all.", stop=UserStop.STOP)

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Never called: this user has no tools."""
        raise AssertionError("the mock user has no tools")

    def fork(self) -> MockUser:
        """Return an independent copy in the same state."""
        return replace(self)
