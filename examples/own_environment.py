"""An environment of your own: what it must do, the check that it does, and a tiny policy that plays it.

    python examples/own_environment.py

The agent opens a lock by guessing a number; the lock answers "higher" or "lower".
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from sinkflex.config import Config, ModelConfig, TinyConfig
from sinkflex.envs.check import check_environment
from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.envs.spaces import ActionSpace, MessageSpace
from sinkflex.policy.chat import Chat
from sinkflex.policy.model import new_policy
from sinkflex.policy.sampler import Sampler
from sinkflex.rollout.group import Phase, rollout

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


class Lock(gymnasium.Env[tuple[Message, ...], Action]):
    """A task is the largest number, "9" or "99"; the seed chooses the secret."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    policy = "Open the lock: call guess with a number."
    tools = ({"type": "function", "function": {"name": "guess", "parameters": NUMBER}},)

    def __init__(self, max_turns: int = 8) -> None:
        self.observation_space, self.action_space = MessageSpace(), ActionSpace(self.tools)
        self.max_turns, self.running = max_turns, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        task_id = (options or {}).get("task_id", "9")
        self.secret, self.turns, self.running = int(self.np_random.integers(int(task_id) + 1)), 0, True
        return (Message("user", f"The secret is between 0 and {task_id}."),), {"stop_reason": None}

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        if not self.running:
            raise ResetNeeded("call reset() first.")
        self.turns += 1
        observation = tuple(self.answer(call) for call in action.tool_calls if not action.error)
        opened = any(message.content == "open" for message in observation)
        reason = StopReason.AGENT_STOP if opened else StopReason.MAX_TURNS if self.turns >= self.max_turns else None
        info = {"stop_reason": reason, "turns": self.turns, "reward_parts": {"opened": float(opened)}}
        self.running = reason is None
        # An action that cannot be used costs a turn and comes back as an error.
        observation = observation or (Message("tool", action.error or "Call guess.", error=True),)
        return observation, float(opened), opened, reason is StopReason.MAX_TURNS, info

    def answer(self, call: ToolCall) -> Message:
        number = call.arguments.get("number")
        if call.name != "guess" or not isinstance(number, int):
            return Message("tool", "Call guess with a whole number.", tool_call_id=call.id, error=True)
        words = "open" if number == self.secret else "higher" if number < self.secret else "lower"
        return Message("tool", words, tool_call_id=call.id)

    def fork(self) -> Lock:
        return copy.deepcopy(self)

    def close(self) -> None:
        self.running = False


if __name__ == "__main__":
    check_environment(Lock)
    config = Config(model=ModelConfig(tiny=TinyConfig(hidden=32, layers=2, head_dim=16, vocabulary=512)))
    policy = new_policy(config, lambda: [Lock.policy, "The secret is between 0 and 9.", 'guess {"number": 5}'])
    chat = Chat(policy.tokenizer, Lock.policy, Lock.tools)
    sampler = Sampler(policy.model, chat.stop_ids, slots=8, max_tokens=1024, max_turn_tokens=16)
    phase = Phase("train", run_seed=0, step=0, policy_version=0, temperature=1.0)
    groups, _ = rollout(["9", "99"], 4, Lock, chat, sampler, phase)
    print({group.task_id: [str(t.stop_reason) for t in group.members] for group in groups})
