"""What a task's answer looks like as calls: for rewards, never for prompts.

The package's gold calls are the changes that solve a task. The expert's calls are a whole episode with its checks,
played in the real environment by the scripted expert; where that does not solve the task they are the gold calls.
"""

from __future__ import annotations

from functools import cache

from sinkflex.envs.env import ToolCall
from sinkflex.envs.tau2.actions import DONE, coerce
from sinkflex.envs.tau2.database import template
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.infeasible import SUFFIX, TRANSFER
from sinkflex.envs.tau2.tasks import read
from sinkflex.policy.sweep import SweepAgent
from sinkflex.rollout.scripted import play

MAX_EXPERT_TURNS = 60


@cache
def gold_calls(domain: str, task_id: str) -> tuple[ToolCall, ...]:
    """Return the gold calls of a task, of both sides, in the package's order; an infeasible one has none."""
    if task_id.endswith(SUFFIX):
        return ()
    criteria = read(domain, task_id).evaluation_criteria
    actions = (criteria.actions if criteria else None) or ()
    return tuple(ToolCall(action.name, dict(action.arguments)) for action in actions)


@cache
def expert_calls(domain: str, task_id: str, diagnose: bool = True) -> tuple[ToolCall, ...]:
    """Return the calls of an expert that works alone on a telecom task, `done` last.

    Args:
        diagnose: it mends what it sees broken; False: it tries every remedy.

    Raises:
        ValueError: the domain has no scripted expert.
    """
    if domain != "telecom":
        raise ValueError(f'there is no scripted expert for {domain!r}; type env.domain = "telecom"')
    env = Tau2Env(domain, solo=True, max_turns=MAX_EXPERT_TURNS, policy_text="none")
    dialogue = play(env, SweepAgent(solo=True, diagnose=diagnose), task_id, seed=0)
    env.close()
    if dialogue.reward == 1.0:
        return tuple(call for action, _ in dialogue.exchanges for call in action.tool_calls)
    hopeless = task_id.endswith(SUFFIX)
    transfer = ToolCall(TRANSFER, {"summary": "The issue could not be solved."})
    return (*((transfer,) if hopeless else gold_calls(domain, task_id)), ToolCall(DONE))


def same_call(domain: str, call: ToolCall, wanted: ToolCall) -> bool:
    """Return whether two calls have one name and equal arguments, in the types of the tool's schema."""
    if call.name != wanted.name:
        return False
    return dict(coerce(domain, call).arguments) == dict(coerce(domain, wanted).arguments)


def changes(domain: str, tool: str) -> bool:
    """Return whether a tool of either side changes anything."""
    return _kind(domain, tool) == "write"


def reads(domain: str, tool: str) -> bool:
    """Return whether a tool of either side shows something and changes nothing."""
    return _kind(domain, tool) == "read"


@cache
def _kind(domain: str, tool: str) -> str | None:
    world = template(domain)
    kits = [kit for kit in (world.tools, world.user_tools) if kit is not None]
    return next((kit.tool_type(tool) for kit in kits if kit.has_tool(tool)), None)
