"""A user of your own: four methods around whatever decides what is said, given to the environment.

    python examples/own_user.py

This one puts another user on a bad line: some of the agent's messages are lost, and the user asks for them again. The
expert, who knows no such user, solves fewer tasks.
"""

from __future__ import annotations

from typing import Any

from sinkflex.envs.env import Message
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.tasks import load
from sinkflex.policy.sweep import SweepAgent
from sinkflex.rollout.scripted import play
from sinkflex.seeds import seed_for
from sinkflex.users.telecom import TelecomUser
from sinkflex.users.user import User, UserAction


class BadLine:
    """Any user, who does not hear `lost` of what the agent says."""

    kind = "scripted on a bad line"

    def __init__(self, user: User, lost: float) -> None:
        self.user, self.lost = user, lost
        self.seed = self.turn = 0

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start a conversation; equal seeds lose equal turns."""
        self.seed, self.turn = seed, 0
        return self.user.reset(task, seed)

    def reply(self, text: str) -> UserAction:
        """Answer the agent's text, or ask for it again."""
        self.turn += 1
        # Keyed by seed and turn: there is no generator whose state a fork would have to copy.
        if seed_for(self.seed, "bad line", self.turn) / 2**63 < self.lost:
            return UserAction(text="I did not hear that, could you say it again?")
        return self.user.reply(text)

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Go on after the results of the user's own tool calls."""
        return self.user.observe(results)

    def fork(self) -> BadLine:
        """Return an independent copy in the same state."""
        twin = BadLine(self.user.fork(), self.lost)
        twin.seed, twin.turn = self.seed, self.turn
        return twin


def caller_on_a_bad_line() -> User:
    """Return a user for one episode."""
    return BadLine(TelecomUser(), lost=0.3)


if __name__ == "__main__":
    for user in ("scripted", caller_on_a_bad_line):
        env = Tau2Env("telecom", split="test", user=user)
        dialogues = [play(env, SweepAgent(), spec.task_id, seed=0) for spec in load("telecom", "test")]
        solved = sum(dialogue.reward == 1.0 for dialogue in dialogues)
        print(f"{dialogues[0].info['user']}: the expert solves {solved} of {len(dialogues)} test tasks")
