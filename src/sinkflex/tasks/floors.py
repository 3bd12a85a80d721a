"""What agents without skill are paid: the floors that stand beside every score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.envs.tau2.actions import DONE
from sinkflex.rollout.scripted import Agent, play


class DoNothing:
    """Says the same polite words until the episode ends; alone with a ticket it is done at once."""

    def __init__(self, solo: bool = False) -> None:
        self.solo = solo

    def reset(self, seed: int) -> None:
        """Nothing to reset."""

    def act(self, messages: list[Message]) -> Action:
        """Return words that ask for nothing."""
        return done() if self.solo else Action(text="Thank you for your patience.")


class AlwaysTransfer:
    """Hands every conversation to a human at once."""

    def __init__(self, solo: bool = False) -> None:
        self.solo = solo

    def reset(self, seed: int) -> None:
        """Nothing to reset."""

    def act(self, messages: list[Message]) -> Action:
        """Call the transfer tool, then say so."""
        if messages[-1].role != "tool":
            return Action(tool_calls=(ToolCall("transfer_to_human_agents", {"summary": "Please help."}, "call_0"),))
        return done() if self.solo else Action(text="You are being transferred to a human agent. Please hold on.")


class Echo:
    """Says the user's own words back, which hold what a text is searched for; alone with a ticket it reads it back."""

    def __init__(self, solo: bool = False) -> None:
        self.solo = solo

    def reset(self, seed: int) -> None:
        """Nothing to reset."""

    def act(self, messages: list[Message]) -> Action:
        """Return what was heard last; alone, once, and then it is done."""
        return done() if self.solo and len(messages) > 1 else Action(text=messages[-1].content or "Go on.")


FLOORS: dict[str, Callable[[bool], Agent]] = {"do_nothing": DoNothing, "always_transfer": AlwaysTransfer, "echo": Echo}


def done() -> Action:
    """Return the action that ends an episode without a user."""
    return Action(tool_calls=(ToolCall(DONE, {}, "call_0"),))


def floors(make_env: Callable[[], Any], task_ids: Sequence[str]) -> dict[str, list[float]]:
    """Return for each floor agent its reward on every task."""
    env = make_env()
    rewards = {
        name: [play(env, agent(env.solo), task_id, seed=0).reward for task_id in task_ids]
        for name, agent in FLOORS.items()
    }
    env.close()
    return rewards
