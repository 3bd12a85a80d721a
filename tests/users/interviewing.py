"""An agent that knows the gold calls and interviews the customer all the same: the oracle of the scripted users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sinkflex.envs.env import Action, StopReason, ToolCall
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.proposals import proposal
from sinkflex.tasks.oracle import QUESTIONS
from sinkflex.users.airline import KINDS as AIRLINE
from sinkflex.users.retail import KINDS as RETAIL
from sinkflex.users.slots import YES

WRITES = {*RETAIL, *AIRLINE}


@dataclass
class Interview:
    """What came of an interview.

    Attributes:
        replies: what the customer said, in order.
        refused: writes that it was not brought to agree to.
    """

    env: Tau2Env
    info: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    replies: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """True after the customer has left."""
        return self.info.get("stop_reason") is not None

    def say(self, text: str) -> str:
        """Say something to the customer and return the reply."""
        if self.ended:
            return ""
        observation, self.reward, *_, self.info = self.env.step(Action(text=text))
        self.replies.append(observation[0].content if observation else "")
        return self.replies[-1]

    def call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Call a tool."""
        if not self.ended:
            *_, self.info = self.env.step(Action(tool_calls=(ToolCall(name, arguments),)))

    def agree(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Propose a change until the customer agrees, four times at most."""
        if any(YES in self.say(f"I will {proposal(name, arguments)}. Do you confirm (yes/no)?") for _ in range(4)):
            return True
        self.refused.append(f"{name} {dict(arguments)}")
        return False


def started(domain: str, task_id: str) -> Interview:
    """Start an episode with the scripted customer."""
    env = Tau2Env(domain, "base", max_turns=200, max_errors=50)
    observation, _ = env.reset(seed=0, options={"task_id": task_id})
    return Interview(env, replies=[observation[0].content])


def interviewed(domain: str, task_id: str, skip_last_write: bool = False) -> Interview:
    """Ask for every slot, have every gold write confirmed, make the gold calls, tell what is to be told, and leave."""
    talk = started(domain, task_id)
    criteria = tasks.read(domain, task_id).evaluation_criteria
    for question in QUESTIONS[domain].values():
        talk.say(question)
    gold = list(criteria.actions or ())
    last = max((i for i, action in enumerate(gold) if action.name in WRITES), default=None)
    for i, action in enumerate(gold):
        if (skip_last_write and i == last) or action.name == "transfer_to_human_agents":
            continue
        if action.name not in WRITES or talk.agree(action.name, action.arguments):
            talk.call(action.name, action.arguments)
    if criteria.communicate_info:
        talk.say(f"Here is what you asked for: {'; '.join(criteria.communicate_info)}.")
    for _ in range(10):
        talk.say("Is there anything else I can help you with?")
    assert talk.info["stop_reason"] is StopReason.USER_STOP
    return talk
