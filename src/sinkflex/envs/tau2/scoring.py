"""The reward of a state: the product of the parts that the task is graded on, equal to the package's evaluator.

The package replays the whole trajectory in a fresh environment and the gold actions in another (seconds in retail and
airline). Here the live world is compared with a gold state that is computed once per task, without changing either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from tau2.data_model.tasks import EnvAssertion, Task
from tau2.environment.environment import Environment

from sinkflex.envs.env import ToolCall
from sinkflex.envs.tau2 import infeasible, tasks
from sinkflex.envs.tau2.database import new_world, same_state


@dataclass(frozen=True, slots=True)
class Score:
    """What a state is worth.

    Attributes:
        reward: product of `parts`, 0.0 or 1.0.
        parts: 0.0 or 1.0 for each part of the task's reward basis: DB, ENV_ASSERTION, ACTION, COMMUNICATE; of an
            infeasible task DB and REFUSAL.
    """

    reward: float
    parts: dict[str, float]


def initialize(world: Environment, task: Task) -> None:
    """Bring a new world into the task's initial state."""
    state = task.initial_state
    if state is not None:
        world.set_state(state.initialization_data, state.initialization_actions, state.message_history or [])


def score(domain: str, task: Task, world: Environment, calls: Sequence[ToolCall], texts: Sequence[str]) -> Score:
    """Score a world, live or final. Changes nothing.

    Args:
        domain: the task's domain.
        task: the task.
        world: the state to score.
        calls: every call made so far, by the agent and by the user.
        texts: every text of the agent so far.
    """
    criteria = task.evaluation_criteria
    if criteria is None:
        return Score(1.0, {})
    if task.id.endswith(infeasible.SUFFIX):
        of_saying_so = infeasible.parts(world, _gold_world(domain, task.id), calls, texts)
        return Score(float(all(of_saying_so.values())), of_saying_so)
    parts: dict[str, float] = {}
    basis = {part.value for part in criteria.reward_basis}
    assert "NL_ASSERTION" not in basis, f"task {task.id!r} needs a judge, which no task of the package does"
    if criteria.actions is not None or criteria.env_assertions is not None:
        if "DB" in basis:
            parts["DB"] = float(same_state(world, _gold_world(domain, task.id)))
        if "ENV_ASSERTION" in basis:
            parts["ENV_ASSERTION"] = float(all(_holds(world, item) for item in criteria.env_assertions or ()))
    if "ACTION" in basis:
        made = cast(Sequence[Any], calls)  # only names and arguments are read
        matched = (any(gold.compare_with_tool_call(call) for call in made) for gold in criteria.actions or ())
        parts["ACTION"] = float(all(matched))
    if "COMMUNICATE" in basis:
        said = [text.lower().replace(",", "") for text in texts]
        wanted = criteria.communicate_info or ()
        parts["COMMUNICATE"] = float(all(any(info.lower() in text for text in said) for info in wanted))
    return Score(float(all(parts.values())), parts)


@cache
def _gold_world(domain: str, task_id: str) -> Environment:
    """The state after the gold actions. As in the package, a gold action that raises is skipped and nothing syncs.

    That of an infeasible task is the initial one.
    """
    task = tasks.read(domain, task_id)
    world = new_world(domain)
    initialize(world, task)
    assert task.evaluation_criteria is not None
    if task.id.endswith(infeasible.SUFFIX):
        return world
    for action in task.evaluation_criteria.actions or ():
        try:
            world.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
        except Exception:  # 23 gold calls of 18 retail tasks raise, and the package scores against what is left
            continue
    return world


def _holds(world: Environment, assertion: EnvAssertion) -> bool:
    toolkit = world.user_tools if assertion.env_type == "user" else world.tools
    try:
        return getattr(toolkit, assertion.func_name)(**assertion.arguments) == assertion.assert_value
    except ValueError:  # what it asks about does not exist; the package's evaluator raises here instead of scoring
        return False
