"""What an agent without skill is paid: the floors that stand beside every score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.rollout.scripted import Agent, play


class DoNothing:
    """Says the same polite words until the episode ends."""

    def reset(self, seed: int) -> None:
        """Nothing to reset."""

    def act(self, messages: list[Message]) -> Action:
        """Return words that ask for nothing."""
        return Action(text="Thank you for your patience.")


class AlwaysTransfer:
    """Hands every conversation to a human at once."""

    def reset(self, seed: int) -> None:
        """Nothing to reset."""

    def act(self, messages: list[Message]) -> Action:
        """Call the transfer tool, then say so."""
        if messages[-1].role == "tool":
            return Action(text="You are being transferred to a human agent. Please hold on.")
        return Action(tool_calls=(ToolCall("transfer_to_human_agents", {"summary": "Please help."}, "call_0"),))


FLOORS: dict[str, Callable[[], Agent]] = {"do_nothing": DoNothing, "always_transfer": AlwaysTransfer}


def floors(make_env: Callable[[], Any], task_ids: Sequence[str]) -> dict[str, list[float]]:
    """Return for each floor agent its reward on every task."""
    env = make_env()
    rewards = {
        name: [play(env, agent(), task_id, seed=0).reward for task_id in task_ids] for name, agent in FLOORS.items()
    }
    env.close()
    return rewards
