"""A user that says and does what a user of an earlier episode said and did, whatever the agent answers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from sinkflex.envs.env import EnvironmentFault, Message, StopReason
from sinkflex.seeds import seed_for
from sinkflex.trajectory import read_trajectories
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


class RecordedUser(ReplayUser):
    """Plays the users of a file of trajectories, each in episodes of its own task.

    Of several recorded episodes of a task it plays the one whose user had the same seed: evaluated again with the same
    seed, split and trials, each trial meets its own recording. Without such an episode the seed picks one. A task that
    was not recorded is an `EnvironmentFault`.

    Args:
        path: a file of `trajectory.write_trajectories`.
        domain: whose tasks are played.

    Raises:
        ValueError: there is no such file, or nothing in it can be played.
    """

    def __init__(self, path: Path, domain: str) -> None:
        super().__init__(())
        self.path = path
        # Environments are made by the dozen; a file that has changed is read again.
        self._recordings = _recordings(path, domain, path.stat().st_mtime_ns if path.is_file() else 0)

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start the recording of this task.

        Raises:
            EnvironmentFault: there is none.
        """
        played = self._recordings.get(task.id)
        if played is None:
            raise EnvironmentFault(f"{self.path} holds no episode of task {task.id!r}")
        history = len((task.initial_state and task.initial_state.message_history) or ())
        record, reason = played[seed] if seed in played else list(played.values())[seed % len(played)]
        self.actions = tuple(recorded_actions(record[history:], reason))
        return super().reset(task, seed)


_Recording = tuple[list[tuple[str, Message]], StopReason]


@lru_cache(maxsize=2)
def _recordings(path: Path, domain: str, changed: int) -> dict[str, dict[int, _Recording]]:
    """Return {task: {seed of its user: (record, stop reason)}} of the valid episodes of a domain."""
    episodes = [t for group in read_trajectories(path) for t in group.valid]
    found: dict[str, dict[int, _Recording]] = {}
    for t in episodes:
        if t.record and t.domain == domain and t.user != "none":
            seed = seed_for(t.seed, "user", t.task_id)
            found.setdefault(t.task_id, {}).setdefault(seed, (t.record, t.stop_reason))
    if not found:
        domains = sorted({t.domain for t in episodes} - {""}) or ["no"]
        raise ValueError(
            f"{path}: no user of {domain} is recorded there ({len(episodes)} valid episodes, of {', '.join(domains)} "
            "domain). Type sinkflex evaluate RUN --save FILE.jsonl.zst to record some"
        )
    return found


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
