"""A rule-based retail expert: who is it, which orders, which items, what instead; look it up, propose, do.

It knows the shop's tools and no task's answer: it reads only what the agent can see (the customer's words and the
results of its own tools). It gives the demonstrations of the retail warm start.

    user:   Hello, I would like to exchange the smart thermostat.
    agent:  Could you please provide your email, or your name and zip code?
    agent:  find_user_id_by_name_zip, get_user_details
    agent:  What is the order number?
    agent:  get_order_details
    agent:  Which items is it about?
    agent:  Which options would you like instead?
    agent:  get_product_details
    agent:  Which payment method would you like to use?
    agent:  I will exchange items 4983901480 for 7747408585 in order #W2378156, ... Do you confirm (yes/no)?
    agent:  exchange_delivered_order_items

What a customer leaves to the agent (conditions, sums, everything but the boots) is beyond it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from itertools import product
from typing import Any

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.policy.proposals import proposal
from sinkflex.seeds import generator

TRIES = 4  # proposals of one change
CLOSING = "Is there anything else I can help you with?"
_EMAIL = re.compile(r"\S+@[\w.]+\w")
_USER_ID = re.compile(r"\b[a-z]+_[a-z]+_\d{4}\b")
_NAME = re.compile(r"\b(?:am|name is|called) ([A-Z]\w+) ([A-Z]\w+)")
_ZIP = re.compile(r"\b\d{5}\b")
_ORDER = re.compile(r"#W\d{7}")
_ADDRESS = re.compile(r"(\d+ [^,:]+), (?:([^,]+), )?([^,]+), ([A-Z]{2}), (\w+), (\d{5})")
_QUESTION = re.compile(r"how much|in total|total price|tracking", re.IGNORECASE)
_PARTS = ("address1", "address2", "city", "state", "country", "zip")
_SWAP = re.compile(r"exchang|chang|modif|upgrad|replac|swap")

Script = Generator[Action, str, Any]


class ClerkAgent:
    """The expert as a policy of one episode at a time: `reset(seed)`, then `act(messages)` until the episode ends.

    Args:
        rng_seed: with the seed of `reset`, decides omissions.
        omit: probability that a change is left out, each on its own; makes imperfect demonstrations.
    """

    def __init__(self, rng_seed: int = 0, omit: float = 0.0) -> None:
        self.rng_seed, self.omit = rng_seed, omit
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget everything and start an episode."""
        self._rng = generator(self.rng_seed, "expert", seed)
        self._script: Script | None = None
        self._answers: dict[str, str] = {}
        self._facts: list[str] = []
        self._amounts: list[float] = []
        self._user: dict[str, Any] = {}

    def act(self, messages: list[Message]) -> Action:
        """Return the next action.

        Args:
            messages: the conversation so far as the agent sees it; it grows from call to call.
        """
        heard = messages[-1].content
        if self._script is None:
            self._script = self._serve(heard)
            return next(self._script)
        return self._script.send(heard)

    def _serve(self, opening: str) -> Script:
        """The whole episode: yields actions, is sent what comes back, and never ends by itself."""
        self._user = yield from self._identify(opening)
        if self._user:
            if re.search(r"\b(?:default|user) address|\bmy address\b", opening):
                yield from self._move(opening, {})
            heard = yield from self._ask("What is the order number?")
            for request, order_ids in _requests(opening, heard):
                for order_id in order_ids:
                    order = _fields((yield from self._call("get_order_details", order_id=order_id)))
                    if order:
                        yield from self._change(request.lower(), order)
        heard = f"{opening} {' '.join(self._answers.values())}"
        while True:
            if _QUESTION.search(heard) and (self._amounts or self._facts):
                amounts = [f"${abs(amount):.2f}" for amount in dict.fromkeys([*self._amounts, sum(self._amounts)])]
                yield Action(text=" ".join([f"The amount is {', '.join(amounts)}.", *dict.fromkeys(self._facts)]))
            heard = yield Action(text=CLOSING)

    def _identify(self, opening: str) -> Script:
        """Return the customer's record, {} if they cannot be found."""
        said = f"{opening} {(yield from self._ask('Could you please provide your email, or your name and zip code?'))}"
        user_id = _USER_ID.search(said)
        found = user_id[0] if user_id else ""
        for email in () if found else _EMAIL.findall(said):
            found = found or _id((yield from self._call("find_user_id_by_email", email=email)))
        if not found and (name := _NAME.search(said)) and (zip_code := _ZIP.search(said)):
            names = {"first_name": name[1], "last_name": name[2], "zip": zip_code[0]}
            found = _id((yield from self._call("find_user_id_by_name_zip", **names)))
        return _fields((yield from self._call("get_user_details", user_id=found))) if found else {}

    def _change(self, request: str, order: Mapping[str, Any]) -> Script:
        """Find out what is wanted of an order, and do what its status allows."""
        key, status = {"order_id": order["order_id"]}, order["status"]
        self._facts += [f"Tracking number: {number}." for one in order["fulfillments"] for number in one["tracking_id"]]
        if status == "pending" and "cancel" in request:
            yield from self._cancel(order)
            return
        if status == "pending" and "payment method of" in request:
            payment = yield from self._payment(order)
            yield from self._do("modify_pending_order_payment", 0.0, {**key, "payment_method_id": payment})
            return
        if status == "pending" and "address" in request:
            yield from self._move(request, order)
        if status not in ("pending", "delivered") or request.endswith("address of an order"):
            return
        swap = status == "pending" or _SWAP.search(request) is not None
        items = _chosen((yield from self._ask("Which items is it about?")), order)
        choices = (yield from self._instead(items)) if swap else [(0.0, [])]
        if items and choices:
            payment = yield from self._payment(order)
            amount = sum(item["price"] for item in items)
            delivered = "exchange_delivered_order_items" if swap else "return_delivered_order_items"
            fixed = {**key, "item_ids": [item["item_id"] for item in items]}
            tries = [{**fixed, "new_item_ids": new, "payment_method_id": payment} for _, new in choices]
            if not swap:
                tries = [{**fixed, "payment_method_id": payment}]
            name = "modify_pending_order_items" if status == "pending" else delivered
            heard = yield from self._do(name, amount - choices[0][0], *tries)
            if status == "pending" and "cancel" in heard:
                yield from self._cancel(order)

    def _cancel(self, order: Mapping[str, Any]) -> Script:
        """Cancel an order for the customer's reason."""
        said = _of_order((yield from self._ask("What is the reason?")), order)
        reason = "ordered by mistake" if "mistake" in said else "no longer needed"
        amount = sum(item["price"] for item in order["items"])
        yield from self._do("cancel_pending_order", amount, {"order_id": order["order_id"], "reason": reason})

    def _move(self, request: str, order: Mapping[str, Any]) -> Script:
        """Change the address of an order, or (an empty one) of the customer."""
        said = yield from self._ask("What is the address?")
        where = _ADDRESS.search(said)
        address = dict(zip(_PARTS, where.groups(""), strict=True)) if where else {}
        if not address and "default" in said:
            address = self._user["address"]
        for order_id in () if address else _ORDER.findall(said) or self._user["orders"]:
            other = _fields((yield from self._call("get_order_details", order_id=order_id)))
            if other and (order_id in said or other["address"]["city"] in f"{said} {request}"):
                address = other["address"]
                break
        if address:
            owner = {"order_id": order["order_id"]} if order else {"user_id": self._user["user_id"]}
            name = "modify_pending_order_address" if order else "modify_user_address"
            yield from self._do(name, 0.0, {**owner, **address})

    def _instead(self, items: Sequence[Mapping[str, Any]]) -> Script:
        """Return what the wish can mean, likeliest first: the price of all, and the variant's id for each item."""
        wish = (yield from self._ask("Which options would you like instead?")).lower()
        ranked = []
        for place, item in enumerate(items):
            details = yield from self._call("get_product_details", product_id=item["product_id"])
            ranked.append(_ranked(_part(wish, place, items), item, _fields(details).get("variants", {}))[:TRIES])
        places = sorted(product(*(range(len(one)) for one in ranked)), key=sum)[:TRIES]
        chosen = [[one[i] for one, i in zip(ranked, place, strict=True)] for place in places]
        return [(sum(one["price"] for one in variants), [one["item_id"] for one in variants]) for variants in chosen]

    def _payment(self, order: Mapping[str, Any]) -> Script:
        """Return the id of the payment method that the customer names, else of the one that the order was paid with."""
        said = _of_order((yield from self._ask("Which payment method would you like to use?")), order)
        scores = {name: _likeness(said, method) for name, method in self._user["payment_methods"].items()}
        best = max(scores, key=lambda name: scores[name], default="")
        return best if scores.get(best) and "original" not in said else order["payment_history"][0]["payment_method_id"]

    def _do(self, name: str, amount: float, *tries: Mapping[str, Any]) -> Script:
        """Propose a change until the customer agrees, the next thing that it can mean after a no; and make it.

        Args:
            name: the tool.
            amount: that the customer gets back.
            tries: arguments, likeliest first.

        Returns:
            What the customer said last.
        """
        left, heard = list(tries), ""
        for _ in range(TRIES if self._rng.random() >= self.omit else 0):
            heard = yield Action(text=f"I will {proposal(name, left[0])}. Do you confirm (yes/no)?")
            if heard.startswith("Yes"):
                yield from self._call(name, **left[0])
                self._amounts.append(amount)
                return heard
            left = left[1:] if heard.startswith("No") else left
            if not left:
                break
        return heard

    def _ask(self, question: str) -> Script:
        """Return what the customer answers; nothing is asked twice."""
        if question not in self._answers:
            self._answers[question] = yield Action(text=question)
        return self._answers[question]

    def _call(self, name: str, **arguments: Any) -> Script:
        return (yield Action(tool_calls=(ToolCall(name, arguments),)))


def _requests(opening: str, heard: str) -> list[tuple[str, list[str]]]:
    """Return (what is wanted, of which orders): by request where the customer tells them apart."""
    told = [(request, _ORDER.findall(ids)) for request, ids in re.findall(r"(?:To|For) ([^:]+): ([^.]*)\.", heard)]
    return [pair for pair in told if pair[1]] or [(opening, list(dict.fromkeys(_ORDER.findall(heard))))]


def _of_order(heard: str, order: Mapping[str, Any]) -> str:
    """Return what is said about an order, where orders are told apart, else everything."""
    mine = re.search(rf"For order {order['order_id']}: (.*?)\.(?: For order|$)", heard)
    return (mine[1] if mine else heard).lower()


def _chosen(heard: str, order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an order that the customer speaks of."""
    text, left = _of_order(heard, order), list(order["items"])
    if "(" in text:
        chosen = []
        for part in text.split(";"):
            known = [item for item in left if item["name"].lower() in part]
            if known:
                chosen.append(max(known, key=lambda item: sum(_in(one, part) for one in item["options"].values())))
                left.remove(chosen[-1])
        return chosen
    text, _, kept = text.replace(" but ", " except ").partition(" except ")
    if re.search(r"\ball\b|everything", text):
        return [item for item in left if not _names(item, kept)]
    named = [item for item in left if _names(item, text)]
    if match := re.search(r"(more|less) expensive", text):
        named = [max(named, key=lambda item: item["price"] * (1 if match[1] == "more" else -1))] if named else []
    return named


def _names(item: Mapping[str, Any], text: str) -> bool:
    """True if a text speaks of an item."""
    name = item["name"].lower()
    return bool(text) and (
        name.split()[-1] in text or name.removeprefix("espresso ").replace("maker", "machine") in text
    )


def _part(wish: str, place: int, items: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of a wish that is about an item."""
    parts = wish.split(";")
    if len(parts) == len(items) > 1:
        return parts[place]
    name = items[place]["name"].lower().split()[-1]
    return " ".join(text for text in re.split(r"(?<=[.!?]) ", wish) if name in text) or wish


def _ranked(wish: str, item: Mapping[str, Any], variants: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the available variants, the one that a wish describes best first; what it leaves open stays as it is."""
    if re.search(r"\bthe same .*again\b", wish):
        return [item]
    told, _, avoided = wish.partition("instead of")

    def fit(variant: Mapping[str, Any]) -> float:
        score = variant["price"] * (-100 if "cheapest" in wish else 100 if "most expensive" in wish else -1e-6)
        for key, value in variant["options"].items():
            named = _named(value, told)
            score += named or (item["options"].get(key) == value) - 2 * _in(value, avoided)
        return score

    free = [one for one in variants.values() if one["available"] and one["item_id"] != item["item_id"]]
    return sorted(free, key=lambda one: (one["item_id"] not in wish, -fit(one)))


def _named(value: str, text: str) -> float:
    """Return how clearly a text names an option: all of it, or one long word of it; what comes first counts more."""
    for weight, words in ((3, value.lower()), *((1.5, word) for word in value.lower().split() if len(word) > 3)):
        if found := re.search(rf"(?<!\w){re.escape(words)}", text):
            return weight - found.start() / (len(text) + 1)
    return 0.0


def _likeness(said: str, method: Mapping[str, Any]) -> int:
    """How well words fit a payment method: its kind, then brand and number."""
    if method["source"].replace("_", " ") not in said:
        return 0
    return 1 + sum(str(method.get(key, "-")).lower() in said for key in ("brand", "last_four"))


def _in(value: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value.lower())}(?!\w)", text) is not None


def _id(content: str) -> str:
    """Return a user id that a tool has found, "" if it has not."""
    return content.strip('"') if _USER_ID.fullmatch(content.strip('"')) else ""


def _fields(content: str) -> Any:
    """Return the value of a tool result in JSON, or {} if it is none (an error message)."""
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return {}
