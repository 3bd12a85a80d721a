"""What the tests of tau2 environments play with: a user that follows a list, and short ways to an episode."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sinkflex.envs.env import Action, ToolCall
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.users.user import UserAction

SLOW_DATA = "[mobile_data_issue]data_saver_mode_on[PERSONA:Easy]"


@dataclass
class Script:
    """A user that plays a fixed list of actions and keeps what it hears."""

    actions: list[Any]
    kind: str = "replay"
    heard: list[Any] = field(default_factory=list)

    def reset(self, task, seed):
        self.seed = seed
        return UserAction(text="Hello, I need help.")

    def _next(self, heard):
        self.heard.append(heard)
        action = self.actions[min(len(self.heard), len(self.actions)) - 1]
        if isinstance(action, Exception):
            raise action
        return action

    reply = observe = _next

    def fork(self):
        return replace(self, heard=list(self.heard))


def telecom(*user_actions: Any, **options: Any) -> Tau2Env:
    env = Tau2Env("telecom", split="small", user=Script(list(user_actions or [UserAction(text="Okay.")])), **options)
    env.reset(seed=0, options={"task_id": SLOW_DATA})
    return env


def solo(domain: str = "telecom", **options: Any) -> Tau2Env:
    env = Tau2Env(domain, split="base", solo=True, **options)
    env.reset(seed=0)
    return env


def calls(*names: str, **arguments: Any) -> Action:
    return Action(tool_calls=tuple(ToolCall(name, arguments) for name in names))
