"""The scripted customer of tau2's airline domain.

Example:

    user:   Hello, I want to change my trip from ATL to PHL to the day after.
    agent:  What is your reservation id, and which flights would you like?
    user:   The reservation id is M05KNL. The cheapest economy flight on the day after the original one.
    agent:  I will change M05KNL to HAT110 and HAT172 on 2024-05-24 in economy, refunded to gift_card_8887175. Is that
            correct?
    user:   Yes, please proceed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from sinkflex.envs.tau2.database import template
from sinkflex.users.scripts import Script, Write, entries, listing, payment_choice, payment_words, read_script
from sinkflex.users.slots import SlotUser

_RESERVATION = re.compile(r"\b[A-Z0-9]{6}\b")
_OTHER_ID = re.compile(r"\bhat\d{3}\b|\b(?:credit_card|gift_card|certificate)_\d+\b")
KINDS = {
    "cancel_reservation": r"cancel",
    "update_reservation_flights": r"chang|modif|updat|upgrad|downgrad|switch|move|rebook|flight",
    "update_reservation_passengers": r"passenger|name",
    "update_reservation_baggages": r"bag|luggage|suitcase",
    "book_reservation": r"\bbook|reserv",
    "send_certificate": r"certificate|voucher|compensat",
}


class AirlineUser(SlotUser):
    """A customer of the airline, made of a task's scenario, its gold changes and `airline.toml`."""

    kinds: ClassVar[Mapping[str, re.Pattern[str]]] = {name: re.compile(text) for name, text in KINDS.items()}
    topics: ClassVar[Mapping[str, re.Pattern[str]]] = {
        name: re.compile(text)
        for name, text in {
            "identity": r"\buser ?id|\byour (?:full |first |last )?name\b|identi|\bverif|e-?mail",
            "reservation": r"\b(?:reservation|confirmation|booking) ?(?:id|number|code|reference|#)"
            r"|\b(?:which|what) (?:\w+ ){0,2}(?:reservation|booking|trip)",
            "route": r"\borigin|\bdestination|\bfrom where|\bwhere .{0,30}\bfl(?:y|ying)\b|\bone.way|\bround.?trip"
            r"|\b(?:which|what) airport|\bcit(?:y|ies)\b",
            "flights": r"\bflights?\b|\bdates?\b|\bwhen\b|\bwhat (?:day|time)|\bwhich day",
            "cabin": r"\bcabin|\bclass\b|\beconomy\b|\bbusiness\b",
            "passengers": r"\bpassengers?\b|\btravell?er|\bdates? of birth|\bdob\b|\bbirth",
            "bags": r"\bbags?\b|\bbaggage|\bluggage|\bsuitcase",
            "insurance": r"\binsurance\b",
            "payment": r"payment|\bpay\b|refund(?:ed)? (?:to|method)|\bcards?\b|\bcertificates?\b",
            "reason": r"\breason\b|\bwhy\b",
        }.items()
    }
    leads: ClassVar[Mapping[str, str]] = {
        "reservation": "The reservation id is ",
        "route": "I want to fly ",
        "flights": "I would like ",
        "cabin": "I want ",
        "passengers": "The passengers are ",
        "bags": "I need ",
        "insurance": "I want ",
        "payment": "Please use ",
    }

    def script(self, task: Any) -> Script:
        """Return what the customer of an airline task knows and wants."""
        writes = [_write(a.name, a.arguments) for a in task.evaluation_criteria.actions or () if a.name in KINDS]
        for accepted in entries("airline").get(task.id, {}).get("accepts", ()):
            kind, _, reservation = accepted.partition(" ")
            writes.append(Write(kind, "", f"reservation {reservation}", (reservation.lower(),), None, wanted=False))
        return read_script("airline", task, writes)

    def ids(self, text: str) -> set[str]:
        """Return reservation ids, flight numbers and payment ids."""
        reservations = _database().reservations
        codes = {code.lower() for code in _RESERVATION.findall(text) if code in reservations}
        return codes | set(_OTHER_ID.findall(text.lower()))


def _write(name: str, arguments: Mapping[str, Any]) -> Write:
    """Return a gold call as a change that the customer wants."""
    if name == "send_certificate":  # the customer cannot know what is due, and takes what is offered
        return Write(name, "get a compensation", "the compensation", ("",), None)
    if name == "book_reservation":
        return _booking(arguments)
    reservation_id = arguments["reservation_id"]
    database = _database()
    now = database.reservations.peek(reservation_id)
    must, may = [reservation_id.lower()], {flight.flight_number.lower() for flight in now.flights}
    slots, choices = {"reservation": reservation_id}, {}
    request = "cancel a reservation"
    if payment := arguments.get("payment_id"):
        slots["payment"] = payment_words(database.users.peek(now.user_id), payment)
        choices["payment"] = payment_choice(payment)
        may.add(payment)
    if name == "update_reservation_flights":
        flights, cabin = arguments["flights"], arguments["cabin"].replace("_", " ")
        same = [(f["flight_number"], f["date"]) for f in flights] == [(f.flight_number, f.date) for f in now.flights]
        slots["flights"] = "the same flights as now" if same else _flights(flights)
        slots["cabin"], choices["cabin"] = cabin, frozenset({cabin})
        must += [cabin.rpartition(" ")[2]]
        must += [] if same else dict.fromkeys(flight["flight_number"].lower() for flight in flights)
        request = f"change a reservation to {cabin}" if same else "change the flights of a reservation"
    elif name == "update_reservation_passengers":
        slots["passengers"] = _passengers(arguments["passengers"])
        must += [f"{who['first_name']} {who['last_name']}".lower() for who in arguments["passengers"]]
        request = "change the passengers of a reservation"
    elif name == "update_reservation_baggages":
        slots["bags"], choices["bags"] = _bags(arguments), frozenset({str(arguments["total_baggages"])})
        request = "add checked bags to a reservation"
    return Write(name, request, f"reservation {reservation_id}", tuple(must), frozenset(may), choices, slots)


def _booking(arguments: Mapping[str, Any]) -> Write:
    user = _database().users.peek(arguments["user_id"])
    payments = [method["payment_id"] for method in arguments["payment_methods"]]
    names = listing(who["first_name"] for who in arguments["passengers"])
    flight_type, cabin = arguments["flight_type"].replace("_", " "), arguments["cabin"].replace("_", " ")
    return Write(
        "book_reservation",
        "book a flight",
        f"the flight of {names}",
        (
            *dict.fromkeys(flight["flight_number"].lower() for flight in arguments["flights"]),
            *(f"{who['first_name']} {who['last_name']}".lower() for who in arguments["passengers"]),
        ),
        frozenset(payments),
        {"payment": payment_choice(*payments), "cabin": frozenset({cabin})},
        {
            "route": f"from {arguments['origin']} to {arguments['destination']}, {flight_type}",
            "flights": _flights(arguments["flights"]),
            "cabin": cabin,
            "passengers": _passengers(arguments["passengers"]),
            "bags": _bags(arguments),
            "insurance": "insurance" if arguments["insurance"] == "yes" else "no insurance",
            "payment": listing(payment_words(user, payment) for payment in payments),
        },
    )


def _flights(flights: list[Mapping[str, str]]) -> str:
    return listing(f"{flight['flight_number']} on {flight['date']}" for flight in flights)


def _passengers(passengers: list[Mapping[str, str]]) -> str:
    return "; ".join(f"{who['first_name']} {who['last_name']}, born {who['dob']}" for who in passengers)


def _bags(arguments: Mapping[str, Any]) -> str:
    count = arguments["total_baggages"]
    return f"{count or 'no'} checked bag{'' if count == 1 else 's'}" + (" in total" if count else "")


def _database() -> Any:
    tools: Any = template("airline").tools
    return tools.db
