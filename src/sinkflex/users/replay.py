"""A user that says and does what a user of an earlier episode said and did, whatever the agent answers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from sinkflex.envs.env import EnvironmentFault, Message, StopReason
from sinkflex.users.user import UserAction, UserStop

_STOPS = {
    StopReason.USER_STOP: UserStop.STOP,
    StopReason.TRANSFER: UserStop.TRANSFER,
    StopReason.OUT_OF_SCOPE: UserStop.OUT_OF_SCOPE,
}


class ReplayUser:
    """Plays recorded actions in order; follows the `User` protocol.

    An agent that takes the conversation further than the recording gets an `EnvironmentFault`: there is nothing to say,
    and the episode says nothing about the agent.

    Args:
        actions: the user's side, opening words first; see `recorded_actions`.
    """

    kind = "replay"

    def __init__(self, actions: Sequence[UserAction]) -> None:
        self.actions = tuple(actions)
        self._next = 0

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start from the beginning; task and seed are the recording's."""
        self._next = 0
        return self._play()

    def reply(self, text: str) -> UserAction:
        """Play the next action."""
        return self._play()

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Play the next action."""
        return self._play()

    def fork(self) -> ReplayUser:
        """Return an independent copy in the same state."""
        return copy(self)

    def _play(self) -> UserAction:
        if self._next == len(self.actions):
            raise EnvironmentFault(f"the recording ends after {self._next} actions of the user")
        self._next += 1
        return self.actions[self._next - 1]


def recorded_actions(record: Sequence[tuple[str, Message]], stop_reason: StopReason | None) -> list[UserAction]:
    """Return the user's side of an episode.

    Args:
        record: (actor, message) in order, such as `Tau2Env.episode.record`. The user's calls come one at a time.
        stop_reason: why the episode ended.
    """
    said = [(actor, message) for actor, message in record if message.role != "tool"]
    actions = [UserAction(message.content or None, message.tool_calls) for actor, message in said if actor == "user"]
    stop = _STOPS.get(stop_reason) if stop_reason is not None else None
    if stop is not None and said[-1][0] == "user" and not said[-1][1].tool_calls:
        actions[-1] = UserAction(actions[-1].text, stop=stop)
    elif stop is not None:  # without a word
        actions.append(UserAction(stop=stop))
    return actions
