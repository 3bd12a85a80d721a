"""The conversation of a scripted customer who knows what they want and says no more than they are asked.

Retail and airline share it; what a customer knows and wants (a `Script`) is read off the task by `retail.py` and
`airline.py`. In order of precedence, the customer answers an agent's message so:

    says that it transfers the customer      ends with TRANSFER
    a rule of the script applies             its words, once ("if the agent asks for confirmation, ...")
    asks for something the customer knows    the slots asked for, and no others
    proposes a change                        yes, if it names the ids of a change that is wanted; no, if it names
                                             others; and a request for the ids, if it names none
    is finished, or refuses                  what is still open, once; then STOP
    anything else                            a short reply; STOP when `PATIENCE` replies in a row are nothing new
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sinkflex.envs.env import Message
from sinkflex.users.hearing import ACTS, CHOICES, Heard, hear
from sinkflex.users.scripts import Script, Write, listing, wishes
from sinkflex.users.user import UserAction, UserStop

PATIENCE = 4  # replies in a row that are nothing new before the customer gives up
LATER = 3  # the agent message from which on the trigger "later" holds

YES = "Yes, please proceed."
NO = "No, that is not what I want."
DETAILS = "Please list exactly what you will change, with all ids, and I will confirm."
UNKNOWN = "I do not have that information."
CLARIFICATION = "Sorry, I did not understand. What do you need from me?"
AGAIN = "Could you please check that again?"
RIGHT = "Yes, that is right."
AGREED = "Yes, that is what I want."
OKAY = "Okay."
FAREWELL = "Thank you, that is all. Goodbye."
IMPATIENT = "This does not help me. Goodbye."


class SlotUser:
    """A deterministic customer without tools; follows the `User` protocol. A domain fills in the class attributes.

    Equal task and inputs give equal replies: the seed has nothing to vary. No reply that says yes or no to a change
    ends the conversation. State is a few small sets, so that `fork` and pickle cost nothing.
    """

    kind = "scripted"
    topics: ClassVar[Mapping[str, re.Pattern[str]]]
    leads: ClassVar[Mapping[str, str]]
    kinds: ClassVar[Mapping[str, re.Pattern[str]]]

    def script(self, task: Any) -> Script:
        """Return what the customer of a task knows and wants."""
        raise NotImplementedError

    def ids(self, text: str) -> set[str]:
        """Return the ids in an agent's message, in lower case."""
        raise NotImplementedError

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start a conversation on a tau2 task and return the opening words."""
        self._script = self.script(task)
        self._turn = self._idle = 0
        self._fired: frozenset[int] = frozenset()
        self._confirmed: frozenset[int] = frozenset()
        self._reminded: frozenset[int] | None = None  # the changes that were open at the last reminder
        self._asked = not self._script.question
        self._said = frozenset({self._script.opening, OKAY, CLARIFICATION})
        return UserAction(text=self._script.opening)

    def reply(self, text: str) -> UserAction:
        """Answer the agent's text."""
        self._turn += 1
        heard = hear(text, self.topics)
        topics = set(heard.topics) | ({"later"} if self._turn >= LATER else set())
        if "transfer" in topics:
            return UserAction(text="Okay, thank you.", stop=UserStop.TRANSFER)
        parts = []
        if rule := self._rule(heard, topics):
            trigger, words = rule
            parts.append(words)
            topics -= {*trigger.split(", "), *ACTS}
        asked = [topic for topic in self.topics if topic in topics]
        parts += [answer for topic in asked if (answer := self._answer(topic, heard)) and answer not in parts]
        if "confirm" in topics:
            return self._judge(heard, parts)
        if "human" in topics:
            parts.append("Yes, please." if self._script.wants_human else "No, I do not want to be transferred.")
        elif "offer" in topics and not parts:
            parts.append("Yes, please.")
        if parts:
            return self._say(" ".join(parts))
        if topics & {"closing", "done", "refusal"}:
            return self._wrap_up()
        if "help" in topics:
            return self._say(self._script.opening)
        if "missing" in topics:
            return self._say(AGAIN)
        if asked:
            return self._say(UNKNOWN, f"unknown {asked}")
        return self._say(CLARIFICATION if "?" in heard.text else OKAY)

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Never called: this user has no tools."""
        raise AssertionError("the customer has no tools")

    def fork(self) -> SlotUser:
        """Return an independent copy in the same state."""
        return copy.copy(self)

    def _rule(self, heard: Heard, topics: set[str]) -> tuple[str, str] | None:
        """Return the first unused rule that applies, and use it up."""
        for index, (trigger, words) in enumerate(self._script.rules):
            if index in self._fired:
                continue
            if re.search(trigger[1:], heard.text) if trigger[0] == "~" else topics.intersection(trigger.split(", ")):
                self._fired |= {index}
                return trigger, words
        return None

    def _answer(self, topic: str, heard: Heard) -> str:
        """Return what the customer says about a topic, "" if nothing: of the changes in question, or of all."""
        if topic in self._script.answers:
            return self._script.answers[topic]
        known = {i: write for i, write in enumerate(self._script.writes) if topic in write.slots}
        named = {i: write for i, write in known.items() if write.must[0] in heard.text}
        pending = {i: write for i, write in known.items() if i not in self._confirmed}
        writes = list((named or pending or known).values())
        values = list(dict.fromkeys(write.slots[topic] for write in writes))
        if len(values) == 1:
            return f"{self.leads.get(topic, '')}{values[0]}.".replace("..", ".")
        by_subject: dict[str, list[str]] = {}
        for write in writes:
            value = write.slots[topic]
            subject = f"To {write.request}" if value in write.label else f"For {write.label}"
            by_subject.setdefault(subject, []).append(value)
        return " ".join(f"{subject}: {listing(dict.fromkeys(values))}." for subject, values in by_subject.items())

    def _judge(self, heard: Heard, parts: list[str]) -> UserAction:
        """Say yes or no to a proposed change, or ask which ids it is about."""
        ids = self.ids(heard.original)
        kinds = {kind for kind, pattern in self.kinds.items() if pattern.search(heard.text)}
        writes = {i: write for i, write in enumerate(self._script.writes) if write.kind in kinds}
        fitting = {i for i, write in writes.items() if _names_no_other(heard, write)}
        good = {i for i in fitting if all(text in heard.text for text in writes[i].must)}
        if good and self._belong(ids, good):
            self._confirmed |= good
            return self._say(" ".join([*parts, YES]), f"yes {sorted(self._confirmed)}")
        if parts and not ids:
            return self._say(" ".join(parts))
        if not kinds and ids and self._belong(ids, range(len(self._script.writes))):
            return self._say(" ".join([*parts, RIGHT]))
        vague = {i for i in fitting if not any(text in heard.text for text in writes[i].must[1:])}
        about = {i for i in vague if not ids or writes[i].must[0] in heard.text}
        if about and self._belong(ids, about):
            return self._say(" ".join([*parts, AGREED, DETAILS]))
        if not ids and not kinds:
            return self._say(DETAILS)
        wanted = self._wishes(self._open())
        return self._say(" ".join([*parts, NO, *([f"I would like to {wanted}."] if wanted else [])]))

    def _belong(self, ids: set[str], indices: Iterable[int]) -> bool:
        """True if all ids are ones that the changes can name."""
        writes = [self._script.writes[i] for i in indices]
        if any(write.may is None for write in writes):
            return True
        return ids <= {id for write in writes for id in (*write.must, *(write.may or ()))}

    def _wrap_up(self) -> UserAction:
        """Say what is still open, once; otherwise leave."""
        script, open_now = self._script, self._open()
        if open_now and open_now != self._reminded:
            self._reminded = open_now
            return self._say(f"I would {'also' if self._confirmed else 'still'} like to {self._wishes(open_now)}.")
        if not self._asked:
            self._asked = True
            return self._say(script.question)
        if not (self._fired or self._confirmed) and self._reminded is None:
            self._reminded = open_now
            return self._say(script.opening, "once more")
        return UserAction(text=FAREWELL, stop=UserStop.STOP)

    def _open(self) -> frozenset[int]:
        """Return which wanted changes the customer has not agreed to yet."""
        return frozenset(i for i, write in enumerate(self._script.writes) if write.wanted) - self._confirmed

    def _wishes(self, indices: Iterable[int]) -> str:
        return wishes([self._script.writes[i] for i in sorted(indices)])

    def _say(self, text: str, sense: str = "") -> UserAction:
        """Say something, or give up when too many replies in a row were nothing new: their text or, if given, sense."""
        self._idle = self._idle + 1 if (sense or text) in self._said else 0
        self._said |= {sense or text}
        if self._idle >= PATIENCE:
            return UserAction(text=IMPATIENT, stop=UserStop.STOP)
        return UserAction(text=text)


def _names_no_other(heard: Heard, write: Write) -> bool:
    """True unless a proposal names a payment, cabin, reason or number of bags, and not the one of the change."""
    for choice, values in write.choices.items():
        named = {match.replace("_", " ") for match in CHOICES[choice].findall(heard.text)}
        if named and not named & values:
            return False
    return True
