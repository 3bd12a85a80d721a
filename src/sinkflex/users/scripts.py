"""What a scripted customer knows and wants, read off a task and off the reviewed entries of the domain's TOML file.

An entry holds what neither the scenario's known facts nor the gold changes tell: conditions, questions, secrets.

    [5]
    opening = "I want to exchange a water bottle and a desk lamp."
    rules = [                                       # (trigger, words), each used once
        ["confirm", "Actually, please exchange only the desk lamp."],
        ["confirm", "I changed my mind. ..."],
    ]
    answers.new = "A bigger bottle, ..."            # by topic, instead of what the changes say
    question = "..."                                # asked once more before leaving
    human = true                                    # agrees to be transferred (also where gold transfers)
    accepts = ["cancel_reservation Q69X3R"]         # a change that the customer asks for and gold refuses (airline)
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sinkflex.envs.tau2.infeasible import SUFFIX

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_OF_A_BOOKING = re.compile(r"reservation|confirmation", re.IGNORECASE)
_PERSON = (
    (r"\b[Yy]ou are\b", "I am"),
    (r"\b[Yy]ou're\b", "I am"),
    (r"\b(?:[Yy]our|You(?= name))\b", "my"),  # "You name is", in many scenarios
    (r"\b[Yy]ou\b", "I"),
)


@dataclass(frozen=True, slots=True)
class Write:
    """A change that the customer wants or would accept.

    Attributes:
        kind: a name of the domain's `KINDS`; a proposal has to speak of it.
        request: the change in words, without ids: "exchange the desk lamp".
        label: what it is done to: "order #W6390527".
        must: lower-case texts that a proposal has to contain; the first tells this change from others.
        may: further ids that a proposal can contain; None: any.
        choices: the values that a proposal can name of each of `hearing.CHOICES`.
        slots: what the customer can say about it, by topic.
        wanted: False for what the customer would accept and does not ask for.
    """

    kind: str
    request: str
    label: str
    must: tuple[str, ...]
    may: frozenset[str] | None = frozenset()
    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """What a customer knows and wants.

    Attributes:
        opening: the first words.
        writes: the changes.
        answers: by topic, words that replace what the writes say.
        rules: (trigger, words), each used once, in order. A trigger is a topic, or "~" and a regular expression.
        question: what the customer asks once more before leaving; "" if nothing.
        wants_human: agrees to be transferred.
    """

    opening: str
    writes: tuple[Write, ...]
    answers: Mapping[str, str]
    rules: tuple[tuple[str, str], ...] = ()
    question: str = ""
    wants_human: bool = False


def listing(parts: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def wishes(writes: Sequence[Write]) -> str:
    """Return the requests of changes in one phrase; equal ones are counted ("cancel 2 orders")."""
    counts = Counter(write.request for write in writes)
    phrases = [
        re.sub(r"\ban? (order|reservation)\b", rf"{n} \1s", text) if n > 1 else text for text, n in counts.items()
    ]
    return listing(phrases) if phrases else ""


def payment_words(user: Any, payment: str) -> str:
    """Return a payment method as its owner calls it, or its id where words would fit several.

    Args:
        user: the record of a tau2 user.
        payment: the id of one of their payment methods.
    """
    words = {id: _method_words(method) for id, method in user.payment_methods.items()}
    if payment not in words:
        return payment
    plain = words[payment].partition(" of $")[0].partition(" ending")[0]
    if sum(text.startswith(plain) for text in words.values()) == 1:
        return plain
    return words[payment] if list(words.values()).count(words[payment]) == 1 else payment


def payment_choice(*payments: str) -> frozenset[str]:
    """Return the values of the choice "payment" for payment ids: {"gift card"}."""
    return frozenset(payment.rpartition("_")[0].replace("_", " ") for payment in payments)


def _method_words(method: Any) -> str:
    if method.source == "credit_card":
        return f"my {method.brand.title()} credit card ending in {method.last_four}"
    if method.source == "paypal":
        return "my PayPal account"
    amount = method.amount if hasattr(method, "amount") else method.balance
    return f"my {method.source.replace('_', ' ')} of ${amount:g}"


def read_script(domain: str, task: Any, writes: Sequence[Write]) -> Script:
    """Return the script of a task: what its scenario and its gold changes say, and its entry in the domain's TOML.

    Args:
        domain: names the TOML file.
        task: a tau2 task.
        writes: its changes.
    """
    words = task.user_scenario.instructions
    entry = entries(domain).get(task.id.removesuffix(SUFFIX), {})
    known = own_words(words.known_info or "")
    unknown = [text for text in own_words(words.unknown_info or "") if "mail" in text and "@" not in " ".join(known)]
    identity = " ".join(text for text in [*known, *unknown] if not _OF_A_BOOKING.search(text))
    transfers = any(a.name == "transfer_to_human_agents" for a in task.evaluation_criteria.actions or ())
    return Script(
        entry.get("opening") or f"Hello, I would like to {wishes(writes)}.",
        tuple(writes),
        {"identity": identity, **entry.get("answers", {})},
        tuple((trigger, text) for trigger, text in entry.get("rules", ())),
        entry.get("question", ""),
        transfers or entry.get("human", False),
    )


@cache
def entries(domain: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a domain's TOML file by task id."""
    return tomllib.loads(Path(__file__).with_name(f"{domain}.toml").read_text("utf-8"))


def own_words(text: str) -> list[str]:
    """Return the sentences of a scenario, which speaks to the customer, in the customer's own words."""
    for pattern, word in _PERSON:
        text = re.sub(pattern, word, text)
    sentences = (part.strip() for part in _SENTENCE.split(text))
    return [part[0].upper() + part[1:].rstrip(".") + "." for part in sentences if part.strip(".")]
