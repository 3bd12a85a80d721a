"""The scripted customer of tau2's retail domain.

Example:

    user:   Hello, I would like to exchange the mechanical keyboard and the smart thermostat.
    agent:  Please give me your email, or your name and zip code.
    user:   I am Yusuf Rossi in zip code 19122. I do not remember my email address.
    agent:  Which order is it, and what would you like instead?
    user:   The order number is #W2378156. I would like the mechanical keyboard with switch type clicky, ...
    agent:  I will exchange item 1151293680 for 7706410293 and 4983901480 for 7747408585 in order #W2378156, and
            charge credit_card_9513926. Do you confirm (yes/no)?
    user:   Yes, please proceed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from sinkflex.envs.tau2.database import template
from sinkflex.users.scripts import Script, Write, listing, payment_choice, payment_words, read_script
from sinkflex.users.slots import SlotUser

_ID = re.compile(r"\bw\d{7}\b|\b\d{10}\b|\b(?:credit_card|gift_card|paypal)_\d+\b")
_CHANGE = r"exchang|modif|chang|replac|swap|switch|updat|upgrad"
KINDS = {
    "cancel_pending_order": r"cancel",
    "return_delivered_order_items": r"return|refund",
    "exchange_delivered_order_items": _CHANGE,
    "modify_pending_order_items": _CHANGE,
    "modify_pending_order_address": r"address",
    "modify_user_address": r"address",
    "modify_pending_order_payment": r"pay",
}
_VERBS = {
    "return_delivered_order_items": "return",
    "exchange_delivered_order_items": "exchange",
    "modify_pending_order_items": "change",
}


class RetailUser(SlotUser):
    """A customer of the shop, made of a task's scenario, its gold changes and `retail.toml`."""

    kinds: ClassVar[Mapping[str, re.Pattern[str]]] = {name: re.compile(text) for name, text in KINDS.items()}
    topics: ClassVar[Mapping[str, re.Pattern[str]]] = {
        name: re.compile(text)
        for name, text in {
            "identity": r"e-?mail|\bname\b|\bzip|\bpost(?:al)? ?code|\buser ?id|identi|\bverif|authenticat",
            "order": r"\border ?(?:id|number|no\b|#)|\border'?s? (?:id|number)|\b(?:which|what) (?:\w+ ){0,2}orders?\b",
            "items": r"\bwhich (?:one|thing|of)|\bwhat would you like to (?:return|exchange|cancel|change|modify)"
            r"|\bitems?\b|\bproducts?\b",
            "new": r"\boptions?\b|\bvariants?\b|\binstead\b|\breplace|\bnew (?:item|one|product|version)|\bfeatures?\b"
            r"|\bspecifications?\b|\bprefer(?!red (?:payment|refund))|\bwhat (?:size|colou?r|kind|type|material)"
            r"|\bwhich (?:one|of)\b|\bexchange (?:it|them|this|that) for\b|\bchanged? (?:it |them )?to\b"
            r"|\bfor what(?! reason)\b",
            "payment": r"payment|\bpay\b|refund(?:ed)? (?:to|method)|\bcards?\b|paypal|difference",
            "reason": r"\breason\b|\bwhy\b",
            "address": r"(?<!email )(?<!e-mail )\baddress",
        }.items()
    }
    leads: ClassVar[Mapping[str, str]] = {
        "order": "The order number is ",
        "items": "It is ",
        "new": "I would like ",
        "payment": "Please use ",
        "reason": "The reason is: ",
        "address": "The address is ",
    }

    def script(self, task: Any) -> Script:
        """Return what the customer of a retail task knows and wants."""
        user = _customer(task)
        writes = [_write(a.name, a.arguments, user) for a in task.evaluation_criteria.actions or () if a.name in KINDS]
        return read_script("retail", task, writes)

    def ids(self, text: str) -> set[str]:
        """Return order, item and payment ids, the order ids without "#"."""
        return set(_ID.findall(text.lower()))


def _write(name: str, arguments: Mapping[str, Any], user: Any) -> Write:
    """Return a gold call as a change that the customer wants."""
    order_id = arguments.get("order_id", "")
    must, may, slots = [order_id.strip("#").lower()], set(), {"order": order_id} if order_id else {}
    choices: dict[str, frozenset[str]] = {}
    request, label = "", f"order {order_id}"
    if payment := arguments.get("payment_method_id"):
        slots["payment"], choices["payment"] = payment_words(user, payment), payment_choice(payment)
        may.add(payment)
        request = "change the payment method of an order"
    if name == "cancel_pending_order":
        slots["reason"], choices["reason"] = arguments["reason"], frozenset({arguments["reason"]})
        may |= {id for item in _order(order_id).items for id in (item.item_id, item.product_id)}
        request = "cancel an order"
    elif address := arguments.get("address1"):
        parts = (address, *(arguments[part] for part in ("address2", "city", "state", "country", "zip")))
        slots["address"] = ", ".join(filter(None, parts))
        must += [address.lower(), arguments["zip"]]
        request = "change the address of an order"
        if name == "modify_user_address":
            must.remove("")
            request, label = "change my default address", "my default address"
    elif items := arguments.get("item_ids"):
        new = arguments.get("new_item_ids", ())
        must += [*items, *new]
        may |= {_catalogue()[item][0].product_id for item in items}
        slots["items"] = "; ".join(_described(item, "({})") for item in items)
        if new:
            slots["new"] = "; ".join(_wish(*pair) for pair in zip(items, new, strict=True))
        request = f"{_VERBS[name]} {_counted(items)}" + (" in an order" if name.startswith("modify") else "")
    return Write(name, request, label, tuple(must), frozenset(may), choices, slots)


def _described(item: str, form: str) -> str:
    product, options = _catalogue()[item]
    return f"the {product.name.lower()} " + form.format(listing(f"{name} {value}" for name, value in options.items()))


def _wish(old: str, new: str) -> str:
    if old == new:
        return f"the same {_catalogue()[old][0].name.lower()} again"
    return _described(new, "with {}")


def _counted(items: Sequence[str]) -> str:
    """Return "the tablet and 2 skateboards"."""
    names = [_catalogue()[item][0].name.lower() for item in items]
    counts = {name: names.count(name) for name in names}
    return listing(f"the {name}" if n == 1 else f"{n} {name}s".replace("fs", "ves") for name, n in counts.items())


def _customer(task: Any) -> Any:
    """Return the customer's record: the owner of an order or profile that gold changes, None if it changes nothing."""
    users = _database().users
    for action in task.evaluation_criteria.actions or ():
        if "user_id" in action.arguments:
            return users.peek(action.arguments["user_id"])
        if action.name in KINDS:
            return users.peek(_order(action.arguments["order_id"]).user_id)
    return None


def _order(order_id: str) -> Any:
    return _database().orders.peek(order_id)


@cache
def _catalogue() -> dict[str, tuple[Any, Mapping[str, str]]]:
    """Return the product and the options of every item, sold or in stock, by item id."""
    products: Iterable[Any] = _database().products.values()
    return {id: (product, variant.options) for product in products for id, variant in product.variants.items()}


def _database() -> Any:
    tools: Any = template("retail").tools
    return tools.db
