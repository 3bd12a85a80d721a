"""Practice tasks of retail: customers of the shop's own database, with wishes drawn at random.

    [PRACTICE 0/17]   task 17 of seed 0: a customer wants to exchange the tablet of an order

The package's tasks are few: whoever learns from them alone can learn their ids by heart. Here the name of a task is all
there is to it, and the database has room for any number of them. The reward is the package's own: the state after the
wishes. Whoever appears in a sealed task, by name, email, id or order, is no customer here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from tau2.data_model.tasks import Task

from sinkflex.envs.tau2.database import template
from sinkflex.seeds import generator

NAME = re.compile(r"\[PRACTICE (\d+)/(\d+)\]")
_KINDS = {
    "pending": (
        "cancel_pending_order",
        "modify_pending_order_items",
        "modify_pending_order_address",
        "modify_pending_order_payment",
    ),
    "delivered": ("return_delivered_order_items", "exchange_delivered_order_items"),
}
_IDENTITIES = (
    "Your name is {first} {last} and your zip code is {zip}.",
    "You are {first} {last}, and you live in {city}, {zip}.",
    "Your name is {first} {last} and your email is {email}.",
    "You are {id} living in {city}, {zip}.",
)


def name(seed: int, number: int) -> str:
    """Return the name of a task."""
    return f"[PRACTICE {seed}/{number}]"


def build(task_id: str, sealed: str) -> Task:
    """Return the task of a name; equal names give equal tasks.

    Args:
        task_id: of `name`.
        sealed: the texts of the tasks whose customers are left out.
    """
    found = NAME.fullmatch(task_id)
    assert found, f"no practice task: {task_id!r}"
    rng = generator(int(found[1]), "practice", int(found[2]))
    customers = _customers(sealed)
    user, stranger = (customers[i] for i in rng.choice(len(customers), 2, replace=False))
    address = stranger.address.model_dump()
    orders = [order for order in map(_database().orders.peek, user.orders) if order.status in _KINDS]
    wishes = [_wish(rng, user, orders[rng.integers(len(orders))], address)]
    if rng.random() < 0.1:
        wishes = [("modify_user_address", {"user_id": user.user_id, **address})]
    identity = str(rng.choice(_IDENTITIES)).format(
        first=user.name.first_name,
        last=user.name.last_name,
        zip=user.address.zip,
        city=user.address.city,
        email=user.email,
        id=user.user_id,
    )
    words = {"domain": "retail", "task_instructions": "", "reason_for_call": "", "known_info": identity}
    if user.email not in identity:
        words["unknown_info"] = "You do not remember your email address."
    actions = [{"action_id": str(i), "name": wish, "arguments": what} for i, (wish, what) in enumerate(wishes)]
    fields = {"id": task_id, "user_scenario": {"instructions": words}, "evaluation_criteria": {"actions": actions}}
    return Task.model_validate(fields)


def _wish(rng: np.random.Generator, user: Any, order: Any, address: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return a change of an order, as a call that makes it."""
    kind = str(rng.choice(_KINDS[order.status]))
    key, paid = {"order_id": order.order_id}, order.payment_history[0].payment_method_id
    if kind == "cancel_pending_order":
        return kind, {**key, "reason": str(rng.choice(("no longer needed", "ordered by mistake")))}
    if kind == "modify_pending_order_address":
        return kind, {**key, **address}
    methods = [id for id in user.payment_methods if id != paid and not id.startswith("gift_card")]
    if kind == "modify_pending_order_payment":
        if not methods:
            return _wish(rng, user, order, address)
        return kind, {**key, "payment_method_id": str(rng.choice(methods))}
    items = [order.items[rng.integers(len(order.items))]]
    wish = {**key, "item_ids": [item.item_id for item in items]}
    if kind == "return_delivered_order_items":
        gifts = [id for id in user.payment_methods if id.startswith("gift_card")]
        return kind, {**wish, "payment_method_id": str(rng.choice([paid, *gifts]))}
    wish["new_item_ids"] = [_other(rng, item) for item in items]
    return kind, {**wish, "payment_method_id": str(rng.choice([paid, *methods]))}


def _other(rng: np.random.Generator, item: Any) -> str:
    """Return another variant of an item that is in stock; the item itself if there is none."""
    variants: Mapping[str, Any] = _database().products.peek(item.product_id).variants
    free = [id for id, variant in variants.items() if variant.available and id != item.item_id]
    return str(rng.choice(free or [item.item_id]))


@cache
def _customers(sealed: str) -> Sequence[Any]:
    """Return who has an order that can be changed, and appears nowhere in the sealed texts."""

    def known(user: Any) -> bool:
        traces = (f"{user.name.first_name} {user.name.last_name}", user.user_id, user.email, *user.orders)
        return any(trace in sealed for trace in traces)

    orders = _database().orders
    users: Any = _database().users.values()
    return [
        user for user in users if not known(user) and any(orders.peek(order).status in _KINDS for order in user.orders)
    ]


def _database() -> Any:
    tools: Any = template("retail").tools
    return tools.db
