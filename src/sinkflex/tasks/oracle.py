"""An agent that knows the gold calls and interviews the customer all the same: shows that a task can be solved.

It is for the audit and for tests of users. Nothing of it reaches a policy.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.policy.proposals import PROPOSALS, proposal
from sinkflex.rollout.scripted import Agent
from sinkflex.tasks.floors import done
from sinkflex.users.slots import YES

QUESTIONS: dict[str, dict[str, str]] = {
    "retail": {
        "identity": "Could you please provide your email, or your name and zip code?",
        "order": "What is the order number?",
        "items": "Which items is it about?",
        "new": "Which options would you like instead?",
        "payment": "Which payment method would you like to use?",
        "reason": "What is the reason?",
        "address": "What is the address?",
    },
    "airline": {
        "identity": "Please tell me your user id.",
        "reservation": "What is your reservation id?",
        "route": "Where would you like to fly?",
        "flights": "Which flights would you like, and on which dates?",
        "cabin": "Which cabin do you prefer?",
        "passengers": "Who are the passengers?",
        "bags": "How many bags do you need?",
        "insurance": "Do you need travel insurance?",
        "payment": "How would you like to pay?",
    },
    "mock": {},
}
CLOSING = "Is there anything else I can help you with?"
TRIES = 4  # proposals of one change before the oracle leaves it out

Script = Generator[Action, str, None]


class Oracle:
    """Asks for every slot, has every gold change confirmed, makes the gold calls, tells what is to be told, leaves.

    Args:
        domain: retail, airline or mock.
        task_id: the task whose gold calls are made.
        solo: without a customer; in this case it tells in one message what is to be told, and calls `done`.
    """

    def __init__(self, domain: str, task_id: str, solo: bool = False) -> None:
        self.domain, self.solo = domain, solo
        self.criteria: Any = tasks.read(domain, task_id).evaluation_criteria

    def reset(self, seed: int) -> None:
        """Start an episode; there is nothing for a seed to vary."""
        self._script: Script | None = None

    def act(self, messages: list[Message]) -> Action:
        """Return the next action."""
        if self._script is None:
            self._script = self._solve()
            return next(self._script)
        return self._script.send(messages[-1].content)

    def _solve(self) -> Script:
        for question in () if self.solo else QUESTIONS[self.domain].values():
            yield Action(text=question)
        for action in self.criteria.actions or ():
            if self.solo or action.name not in PROPOSALS or (yield from self._agreed(action.name, action.arguments)):
                yield Action(tool_calls=(ToolCall(action.name, action.arguments),))
        if self.criteria.communicate_info:
            yield Action(text=f"Here is what you asked for: {'; '.join(self.criteria.communicate_info)}.")
        while True:
            yield done() if self.solo else Action(text=CLOSING)

    def _agreed(self, name: str, arguments: Mapping[str, Any]) -> Generator[Action, str, bool]:
        for _ in range(TRIES):
            if YES in (yield Action(text=f"I will {proposal(name, arguments)}. Do you confirm (yes/no)?")):
                return True
        return False


def oracle(domain: str, task_id: str, solo: bool = False) -> Agent:
    """Return who shows that a task can be solved: telecom's rule-based expert, elsewhere the oracle that knows gold."""
    if domain == "telecom":
        from sinkflex.policy.sweep import SweepAgent

        return SweepAgent(solo=solo)
    return Oracle(domain, task_id, solo)
