"""Prompts and a reward function as an environment: single-turn, or with tools until the agent answers in words.

{"prompt": "What is 2 + 3?", "answer": "5"}        one line of the JSONL file, with any further keys

def reward(text, example): return float(text.strip() == example["answer"])
env = PromptEnv({"train": "train.jsonl", "test": "test.jsonl"}, reward)
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, ToolCall, ToolFault, spoken
from sinkflex.envs.spaces import ActionSpace, MessageSpace

Reward = Callable[[str, Mapping[str, Any]], float | Mapping[str, float]]
_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


@dataclass(frozen=True)
class PromptTask:
    """One line of a file; `tags` are its key of that name."""

    task_id: str
    example: Mapping[str, Any]
    tags: Mapping[str, Any] = field(default_factory=dict)


class PromptEnv(gymnasium.Env[tuple[Message, ...], Action]):
    """One example an episode: the prompt, then the agent's calls, then its answer and the reward.

    Args:
        files: {"train": path, "test": path} of JSONL files; each line has "prompt", a text or a list of
            {"role", "content"}, and whatever the reward reads.
        reward: gets the agent's answer, without its thinking, and the line; returns a number, 1 for solved, or its
            parts, which are added up. If it raises, the episode is invalid.
        policy: the system text.
        tools: functions the agent may call; names, types and docstring are shown to it. What they return goes back as
            text, what they raise as an error.
        max_turns: agent turns, calls and unusable output included.

    Raises:
        ValueError: a file is missing, or has a line that is no example.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    solo = False

    def __init__(
        self,
        files: Mapping[str, str | Path],
        reward: Reward,
        policy: str = "",
        tools: Sequence[Callable[..., Any]] = (),
        max_turns: int = 8,
    ) -> None:
        self.policy = policy
        self.tools = tuple(map(schema, tools))
        self.observation_space, self.action_space = MessageSpace(), ActionSpace(self.tools)
        self._functions = {function.__name__: function for function in tools}
        self._reward, self._max_turns = reward, max_turns
        self._tasks = {split: read_examples(split, Path(path)) for split, path in files.items()}
        self._task: PromptTask | None = None
        self._turns = 0

    def tasks(self, split: str) -> Sequence[PromptTask]:
        """Return the examples of a split.

        Raises:
            ValueError: there is no file for it.
        """
        if split not in self._tasks:
            raise ValueError(f"there is no file of {split} prompts; there are {', '.join(self._tasks)}")
        return self._tasks[split]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Show the prompt of `options["task_id"]`, or of a random example."""
        super().reset(seed=seed)
        known = {task.task_id: task for tasks in self._tasks.values() for task in tasks}
        task_id = (options or {}).get("task_id") or str(self.np_random.choice(sorted(known)))
        self._task, self._turns = known[task_id], 0
        prompt = self._task.example["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return tuple(Message(m["role"], m["content"]) for m in messages), self._info(None)

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        """Run calls, or take words as the answer, which ends the episode."""
        if self._task is None:
            raise ResetNeeded("call reset() first: there is no running episode.")
        self._turns += 1
        answer = spoken(action.text or "")
        if action.error or not (answer or action.tool_calls):
            observation = (Message("tool", action.error or "Say something, or call a tool.", error=True),)
        elif action.tool_calls:
            observation = tuple(map(self._call, action.tool_calls))
        else:
            parts = self._score(answer)
            info = self._info(StopReason.AGENT_STOP, parts)
            self._task = None
            return (), sum(parts.values()), True, False, info
        if self._turns < self._max_turns:
            return observation, 0.0, False, False, self._info(None)
        info = self._info(StopReason.MAX_TURNS, {})
        self._task = None
        return observation, 0.0, False, True, info

    def fork(self) -> PromptEnv:
        """Return an independent copy in the same state."""
        twin = copy.copy(self)
        twin._np_random = copy.deepcopy(self._np_random)
        return twin

    def close(self) -> None:
        """End the episode."""
        self._task = None

    def _call(self, call: ToolCall) -> Message:
        function = self._functions.get(call.name)
        if function is None:
            names = ", ".join(self._functions) or "none"
            return Message("tool", f"There is no tool {call.name}. Tools: {names}.", tool_call_id=call.id, error=True)
        try:
            inspect.signature(function).bind(**call.arguments)
            result = function(**call.arguments)
        except EnvironmentFault:
            raise
        except Exception as error:  # the agent's mistake, as far as anybody can tell
            return Message("tool", f"{type(error).__name__}: {error}", tool_call_id=call.id, error=True)
        try:
            text = result if isinstance(result, str) else json.dumps(result)
        except (TypeError, ValueError) as error:
            raise ToolFault(f"tool {call.name} returned what is no JSON: {error}") from error
        return Message("tool", text, tool_call_id=call.id)

    def _score(self, answer: str) -> dict[str, float]:
        assert self._task is not None
        try:
            found = self._reward(answer, self._task.example)
            return {k: float(v) for k, v in (found if isinstance(found, Mapping) else {"reward": found}).items()}
        except Exception as error:
            raise EnvironmentFault(f"the reward function failed: {type(error).__name__}: {error}") from error

    def _info(self, reason: StopReason | None, parts: Mapping[str, float] | None = None) -> dict[str, Any]:
        assert self._task is not None
        info = {"stop_reason": reason, "turns": self._turns, "tags": dict(self._task.tags), "domain": "prompts"}
        return info if parts is None else {**info, "reward_parts": dict(parts)}


@cache
def read_examples(split: str, path: Path) -> tuple[PromptTask, ...]:
    """Read a JSONL file of examples; the task ids are "train/1", "train/2" and so on, by line.

    Raises:
        ValueError: no such file, or a line that is no example.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file, expected a JSONL file with a prompt on each line")
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            example = json.loads(line) if line.strip() else None
            if example is not None:
                assert example["prompt"]
                tasks.append(PromptTask(f"{split}/{number}", example, example.get("tags", {})))
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ValueError(f'{path} line {number}: {line[:60]!r}, expected {{"prompt": "..."}} as JSON') from None
    if not tasks:
        raise ValueError(f"{path} is empty, expected a prompt on each line")
    return tuple(tasks)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the OpenAI schema of a function, from its signature and the first paragraph of its docstring."""
    parameters = inspect.signature(function, eval_str=True).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty]
    kinds = {name: _JSON_TYPES.get(getattr(p.annotation, "__name__", "")) for name, p in parameters.items()}
    properties = {name: {"type": kind} if kind else {} for name, kind in kinds.items()}
    described = {"name": function.__name__, "description": (inspect.getdoc(function) or "").partition("\n\n")[0]}
    return {
        "type": "function",
        "function": {**described, "parameters": {"type": "object", "properties": properties, "required": required}},
    }
