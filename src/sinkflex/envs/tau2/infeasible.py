"""Tasks that cannot be solved, built from those that can, by what the package's own tools do to the world.

    telecom   the SIM card is locked as well, which no tool undoes
    retail    every order of the task is cancelled already, or its items are on their way back

The customer is the original's and wants what the original wants. Success is a transfer to a human or a refusal in
words, with the data of the agent's side as they were. A task is named by its original's name and `SUFFIX`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from tau2.data_model.tasks import EnvFunctionCall, InitialState, Task
from tau2.environment.environment import Environment

from sinkflex.envs.env import ToolCall
from sinkflex.envs.tau2.database import same_state, state_hash, template

SUFFIX = "[INFEASIBLE]"
TRANSFER = "transfer_to_human_agents"
_HOPELESS_ALREADY = ("lock_sim_card", "contract_end")
_REFUSAL = re.compile(
    r"\b(?:can(?:no|')t|can not|unable|impossible|unfortunately|no longer|not (?:possible|able|allowed|eligible))\b",
    re.IGNORECASE,
)


def build(domain: str, task: Task) -> Task:
    """Return the infeasible form of a task.

    Raises:
        ValueError: there is none.
    """
    calls = spoil(domain, task)
    if not calls:
        raise ValueError(
            f"{domain} task {task.id!r} has no infeasible form; see sinkflex.tasks.suites.infeasible_tasks"
        )
    state = task.initial_state or InitialState.model_validate({})
    actions = [*(state.initialization_actions or ()), *calls]
    return task.model_copy(
        update={"id": task.id + SUFFIX, "initial_state": state.model_copy(update={"initialization_actions": actions})}
    )


def parts(world: Environment, before: Environment, calls: Sequence[ToolCall], texts: Sequence[str]) -> dict[str, float]:
    """Return what an episode on an infeasible task is worth: unchanged data, and that it was said.

    Args:
        world: the state to score; before: the initial one.
        calls: made so far.
        texts: of the agent so far.
    """
    # The phone is the customer's own; what counts is what the agent's side keeps.
    phone = world.user_tools is not None
    unchanged = state_hash(world)[0] == state_hash(before)[0] if phone else same_state(world, before)
    said = any(call.name == TRANSFER for call in calls) or any(_REFUSAL.search(text) for text in texts)
    return {"DB": float(unchanged), "REFUSAL": float(said)}


def lockable(task_id: str) -> bool:
    """Return whether a telecom task can be solved until the SIM card is locked."""
    return not any(word in task_id for word in _HOPELESS_ALREADY)


def spoil(domain: str, task: Task) -> list[EnvFunctionCall]:
    """Return the calls that make a task infeasible; none if there are no such calls."""
    if domain == "telecom":
        return [_call("user", "lock_sim_card", mode="pin")] if lockable(task.id) else []
    criteria, tools = task.evaluation_criteria, cast(Any, template(domain).tools)
    if domain != "retail" or criteria is None:
        return []
    changes = [a for a in criteria.actions or () if tools.tool_type(a.name).value == "write"]
    orders = dict.fromkeys(action.arguments.get("order_id") for action in changes)
    ends = [_end_order(tools.db.orders.peek(order)) if order else None for order in orders]
    return [] if None in ends else [call for call in ends if call]


def _end_order(order: Any) -> EnvFunctionCall | None:
    """Return the call after which an order cannot be changed any more; None if it is in no state to make that call."""
    if order is None or order.status not in ("pending", "delivered"):
        return None
    if order.status == "pending":
        return _call("assistant", "cancel_pending_order", order_id=order.order_id, reason="no longer needed")
    return _call(
        "assistant",
        "return_delivered_order_items",
        order_id=order.order_id,
        item_ids=[item.item_id for item in order.items],
        payment_method_id=order.payment_history[0].payment_method_id,
    )


def _call(side: Any, name: str, **arguments: Any) -> EnvFunctionCall:
    return EnvFunctionCall(env_type=side, func_name=name, arguments=arguments)
