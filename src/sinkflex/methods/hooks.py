"""What passes between the loop and a method's hooks: small records, and the hooks that act during a rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkflex.envs.env import Action, StopReason
from sinkflex.trajectory import Turn

if TYPE_CHECKING:
    from sinkflex.learner.scorer import Scorer


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a method may know of a task: its name and its public tags, never its answer."""

    domain: str
    task_id: str
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One turn as the policy sampled it: ids, their log-probs, how it ended, and what it was parsed into."""

    ids: list[int]
    logprobs: list[float]
    finish: str
    action: Action


@dataclass(frozen=True, slots=True)
class Decision:
    """What a method makes of a turn.

    Attributes:
        sampled: the proposal that is kept in the trajectory and trained on.
        executed: what is done instead of it; it enters the history, where a new row starts, and is never trained on.
        stop_reason: ends the episode here, with nothing done.
    """

    sampled: Proposal
    executed: Action | None = None
    stop_reason: StopReason | None = None


@dataclass(frozen=True, slots=True)
class TurnState:
    """What a method sees when a turn is due.

    Attributes:
        phase: "train" where the episode will be trained on; else "validation", "evaluation" or "rollout".
        turns: the turns so far.
        env: the live environment; use `env.fork()` to try something.
    """

    task: TaskFacts
    phase: str
    turns: Sequence[Turn]
    env: Any


@dataclass(frozen=True, slots=True)
class RewardParts:
    """A reward and what it is made of."""

    total: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Invalid:
    """No reward could be found; the episode counts nowhere."""

    cause: str


@dataclass(frozen=True, slots=True)
class Services:
    """What a method may use after a step: its number, the run's folder, and models to score and write with."""

    step: int
    directory: Path
    scorer: Scorer


Propose = Callable[[], Awaitable[Proposal]]


class RolloutHooks:
    """The hooks that `rollout/episode.py` calls; by default the policy acts undisturbed."""

    def prompt(self, task: TaskFacts, phase: str) -> str | None:
        """Return text that stands after the system text in this episode, equal for all siblings; None for nothing."""
        return None

    async def act(self, propose: Propose, state: TurnState) -> Decision:
        """Decide what is done in a turn. `await propose()` samples the turn; called again, it samples another one."""
        return Decision(await propose())
