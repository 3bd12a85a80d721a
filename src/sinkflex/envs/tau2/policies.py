"""What the agent is told: the package's policy texts, short ones of our own, and the ticket of a solo episode."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Literal, get_args

from tau2.data_model.tasks import Task

from sinkflex.envs.tau2.database import template
from sinkflex.envs.tau2.tasks import nearest

PolicyText = Literal["full", "short", "none"]
POLICY_TEXTS: tuple[PolicyText, ...] = get_args(PolicyText)

GREETING = "Hi! How can I help you today?"

# Solo tickets of these domains are ours (the package has none), and the agent may write to the customer once.
TEXT_IN_SOLO = ("retail", "airline")

_SHORT = {
    "telecom": (
        "You are the support agent of a phone company. Look the customer up before you change anything on their "
        "account. Lines, plans and bills are yours to inspect and change with tools; the phone is the user's: ask "
        "them to check or change one thing at a time and wait for the result. Fix the cause of every fault you find. "
        "Only when nothing you or the user can do helps, transfer to a human agent and tell the user so."
    ),
    "retail": (
        "You are the support agent of an online shop. Identify the customer by email, or by name and zip code, before "
        "anything else. Pending orders can be cancelled or modified, delivered orders returned or exchanged, each "
        "once. Before any change list its details and get a clear yes. Refuse what the tools do not allow; transfer "
        "to a human agent only if the request is outside your reach."
    ),
    "airline": (
        "You are the reservation agent of an airline. Get the user id and the reservation first. Before booking, "
        "changing or cancelling anything list its details and get a clear yes. Check every rule on fares, baggage, "
        "insurance and refunds and refuse what breaks one; transfer to a human agent only if the request is outside "
        "your reach."
    ),
    "mock": "You manage tasks for users. Create tasks and update their status with the tools when you are asked to.",
}
_SOLO = (
    "You cannot talk to the customer. Solve the ticket with tool calls alone, and call `done` when it is solved or "
    "cannot be solved."
)
_SOLO_WITH_TEXT = (
    "You cannot hold a conversation: solve the ticket with tool calls, write to the customer once if they must be told "
    "something, and call `done` at the end. Take every confirmation as given."
)


def policy(domain: str, solo: bool, text: str) -> str:
    """Return the system text of an episode.

    Args:
        domain: one of `tasks.DOMAINS`.
        solo: without a user.
        text: `full` is the package's policy, `short` a few sentences that leave most rules out, `none` is empty.
            Results under different texts are not comparable.

    Raises:
        ValueError: no such text.
    """
    if text not in POLICY_TEXTS:
        raise ValueError(f"unknown policy text {text!r}; {nearest(text, POLICY_TEXTS)} of {', '.join(POLICY_TEXTS)}.")
    if text == "none":
        return ""
    body = _full(domain, solo) if text == "full" else _SHORT[domain]
    if not solo:
        return body
    return f"{body}\n\n{_SOLO_WITH_TEXT if domain in TEXT_IN_SOLO else _SOLO}"


def ticket(task: Task) -> str:
    """Return the first observation of a solo episode: the package's ticket, or one made of the user's instructions.

    Telecom and most of mock have tickets. The tickets of telecom's MMS tasks do not say how much data the customer
    would pay for, though some of these tasks need it; they are passed on as they are.
    """
    instructions = task.user_scenario.instructions
    if task.ticket is not None or isinstance(instructions, str):
        return task.ticket or str(instructions)
    parts = (instructions.reason_for_call, instructions.known_info, instructions.task_instructions)
    return "\n\n".join(part.strip() for part in parts if part)


@cache
def _full(domain: str, solo: bool) -> str:
    world = template(domain)
    if not solo or domain in TEXT_IN_SOLO:
        return world.policy
    module = importlib.import_module(f"tau2.domains.{domain}.environment")
    return module.get_environment(solo_mode=True).policy
