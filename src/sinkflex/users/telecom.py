"""The scripted telecom user: it describes its problem, does on its phone what the agent asks, and reports what it sees.

Example (persona None):

    user:   I am unable to send MMS messages ... I am John Smith with phone number 555-123-2002. ...
    agent:  Please turn off airplane mode and reseat your SIM card.
            [the user reads the network status, toggles airplane mode, reseats the card]
    user:   Airplane Mode is now OFF. SIM card re-seated successfully. Status bar: excellent signal, 5G, data enabled.
    agent:  Please try to send an MMS.
    user:   My messaging app can send MMS messages. Thank you, that solves my problem.            [stop]

Everything the user says comes from its scenario or from a result of its own tools; it never looks at the gold actions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sinkflex.envs.env import Message, ToolCall
from sinkflex.seeds import seed_for
from sinkflex.users.telecom_phrases import MAX_CHARACTERS, SWITCHES, Request, first_person, report, requests, verbalize
from sinkflex.users.telecom_phrases import status_bar as read_status_bar
from sinkflex.users.user import UserAction, UserStop

CLARIFICATION = "Sorry, I did not understand. What should I do on my phone?"
READY = "Okay. What should I do next?"
THANKS = "Thank you, that solves my problem."
PATIENCE = 4  # agent turns in a row that bring nothing new before the user gives up


@dataclass(frozen=True, slots=True)
class Persona:
    """How a user takes instructions.

    Attributes:
        opening: what it says about itself at the start; the agent's only hint.
        steps: requests of one message it carries out.
        refuses: carries out none of a message with more requests than `steps`, instead of the first ones.
        question_rate: probability that it asks back before it acts.
    """

    opening: str
    steps: int
    refuses: bool
    question_rate: float


PERSONAS = {
    "none": Persona("", 8, False, 0.0),
    "easy": Persona("Please guide me through it.", 2, False, 0.1),
    "hard": Persona("I am not good with phones, so please give me one step at a time.", 1, True, 0.2),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """When the user is content: the tool that shows it and the test of any tool's result (None: says nothing)."""

    check: str
    test: Callable[[str, str], bool | None]


def _can_send(tool: str, result: str) -> bool | None:
    return " can send MMS" in result if tool == "can_send_mms" else None


def _is_fast(tool: str, result: str) -> bool | None:
    return "(Excellent)" in result if tool == "run_speed_test" else None


def _has_service(tool: str, result: str) -> bool | None:
    if tool == "check_network_status":
        return "Cellular Connection: connected" in result
    bar = read_status_bar(result)
    return None if not bar else "No Signal" not in bar and "Airplane" not in bar


GOALS = {
    "mms": Goal("can_send_mms", _can_send),
    "speed": Goal("run_speed_test", _is_fast),
    "service": Goal("check_status_bar", _has_service),
}

# What the agent's words are about, beside requests to act on the phone.
_TALK = {
    "transfer": r"\btransferr(?:ed|ing)\b|\btransfer you (?:now|to)\b",
    "plan": r"\b(?:change|switch|upgrade|different|new|another|bigger|larger)\b.{0,30}\bplan\b",
    "refuel": r"refuel|top.?up|how (?:much|many)\b.*\b(?:data|gb|gigabytes)|(?:add|buy|more|extra|additional) data",
    "identity": r"\byour (?:full |phone |mobile |account )?(?:name|number|id)\b|identify|\bverify you\b",
    "place": r"\babroad\b|travell?ing|\bcountry\b|\bwhere\b|outside|\blocation\b|at home\b",
    "consent": r"\b(?:shall|should|may|can) (?:i|we)\b|is that (?:ok|fine)|would you like|do you want",
    "outcome": r"working|\bworks?\b|solved|resolved|fixed|anything else|try (?:it )?again|any better",
    "yes": r"\b(?:yes|yeah|sure|correct|right|go ahead|please do|ok|okay|safe|worry|fine|exactly|not lose|n't lose)\b",
    "notice": r"\b(?:i|we) (?:have|will|am|just)\b|\b(?:i|we)'(?:ve|ll)\b|\bhas been\b|\bis now\b|\bmoment\b",
    "help": r"how (?:can|may) i help|what(?: is|'s| seems to be) the (?:problem|issue)|\bdescribe\b|tell me more",
}
_TALK_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _TALK.items()}


def _about(topic: str, text: str) -> bool:
    """Return whether the agent's text is about a topic of `_TALK`."""
    return _TALK_PATTERNS[topic].search(text) is not None


class TelecomUser:
    """A deterministic user of the tau2 telecom domain with the domain's 30 user tools; follows the `User` protocol.

    A switch is guarded: the user reads its state through a tool and toggles only if it differs from what was asked.
    The user never ends the conversation in a turn in which it acts or gives consent; it does when a check that the
    agent asked for shows that its problem is solved, or on the agent's next words. It gives up after `PATIENCE` agent
    turns in a row that bring nothing new. Equal task, seed and inputs give equal replies.
    """

    kind = "scripted"

    def reset(self, task: Any, seed: int) -> UserAction:
        """Start a conversation on a tau2 telecom task and return the opening words.

        Args:
            task: a task with `user_scenario` as in tau2; nothing else of it is read.
            seed: decides when the persona asks back.
        """
        scenario = task.user_scenario
        words = scenario.instructions
        self._seed = seed
        self._turn = 0
        self._persona = PERSONAS[_persona_name(scenario.persona)]
        self._goal = GOALS[_goal_name(words.reason_for_call)]
        self._known = _own_words(words.known_info or "")
        amount = re.search(r"refuel ([\d.]+) GB", words.task_instructions or "")
        self._refuel = amount[1] if amount else None
        self._queue: list[Request] = []
        self._asked: list[Request] = []  # requests held back until the agent answers a question
        self._running: tuple[Request, str] | None = None  # the request being carried out and the tool just called
        self._replies: list[str] = []  # parts of the reply under way
        self._bar = ""
        self._content: bool | None = None  # does the last observation show the goal
        self._consents = self._acted = False
        self._said: set[str] = {CLARIFICATION, READY}
        self._idle_turns = 0
        self._problem = " ".join(_own_words(words.reason_for_call))
        return UserAction(text=" ".join([self._problem, *self._known, self._persona.opening]).strip())

    def reply(self, text: str) -> UserAction:
        """Answer the agent's text: with words, or with the first of the user's own tool calls it leads to."""
        text = text[:MAX_CHARACTERS]
        self._turn += 1
        self._replies, self._bar = [], ""
        self._consents = self._acted = False
        if _about("transfer", text) and "?" not in text:
            return UserAction(text="Okay, thank you.", stop=UserStop.TRANSFER)
        wanted = requests(text)
        if not wanted and self._asked and _about("yes", text):
            self._queue, self._asked = self._asked, []
            return self._next()
        self._answer(text, bool(wanted))
        if question := self._ask_back(wanted):
            return self._say(question)
        if wanted:
            self._asked = []
        self._queue = wanted[: self._persona.steps]
        if len(wanted) > self._persona.steps:
            self._replies.append("Please give me one step at a time.")
            self._queue = [] if self._persona.refuses else self._queue
        if not self._queue and not self._replies and _about("outcome", text):
            self._queue = [Request(self._goal.check)]
        elif not self._queue and not self._replies and _about("notice", text):
            self._replies.append(READY)
        return self._next()

    def observe(self, results: tuple[Message, ...]) -> UserAction:
        """Continue after the result of the user's own tool call."""
        assert self._running is not None and len(results) == 1
        request, tool = self._running
        result = results[0].content
        shown = self._goal.test(tool, result)
        annoyed = tool == self._goal.check and shown is False and self._content is False
        self._content = self._content if shown is None else shown
        switch = SWITCHES.get(request.tool)
        if switch is not None and tool == switch.reader:
            if (switch.shows_on in result) != request.on:
                return self._call(request, request.tool, {})
            self._replies.append(f"{switch.name.capitalize()} is already {'on' if request.on else 'off'}.")
            return self._next()
        if request.tool == "make_payment" and tool == "check_payment_request" and "bill" in result:
            return self._call(request, "make_payment", {})
        self._replies.append(f"I got an error: {result}" if results[0].error else report(tool, result))
        if annoyed:
            self._replies.append("It is still not fixed.")
        if not tool.startswith(("check_", "run_", "can_")):
            self._acted = True
            self._bar = read_status_bar(result).rpartition(", battery")[0]
        return self._next()

    def fork(self) -> TelecomUser:
        """Return an independent copy in the same state."""
        return copy.deepcopy(self)

    def _answer(self, text: str, acting: bool) -> None:
        """Answer what the agent wants to know or wants consent for."""
        asking = "?" in text or "let me know" in text.lower()
        if asking and _about("plan", text):
            self._replies.append("I do not want to change my plan.")
        if asking and _about("refuel", text):
            self._consents = True
            wish = f"Yes, please refuel {self._refuel} GB of data." if self._refuel else "I do not want to refuel data."
            self._replies.append(wish)
        if acting or self._replies:
            return
        if _about("identity", text):
            self._replies.append(self._known[0] if self._known else "I do not have that information.")
        elif _about("help", text):
            self._replies.append(self._problem)
        elif asking and _about("place", text):
            self._replies.append(self._known[1] if len(self._known) > 1 else "I do not have that information.")
        elif asking and _about("consent", text) and not _about("outcome", text):
            self._consents = True
            self._replies.append("Yes, please go ahead.")

    def _ask_back(self, wanted: list[Request]) -> str | None:
        """Return a question before acting, if the persona has one now; the requests wait for the answer."""
        draw = seed_for(self._seed, "user", self._turn) / 2**63
        if self._asked or not 0 < len(wanted) <= self._persona.steps or draw >= self._persona.question_rate:
            return None
        self._asked = wanted
        first = wanted[0]
        if first.tool == "reboot_device":
            return "Will I lose my photos if I reboot my phone?"
        step = verbalize(first.tool, first.arguments, first.on).removeprefix("Please ").rstrip(".")
        return f"Just to be sure, should I {step.replace('your', 'my')}?"

    def _next(self) -> UserAction:
        """Carry out the next request, or finish the reply."""
        if self._queue:
            request = self._queue.pop(0)
            tool, arguments = request.tool, dict(request.arguments)
            if request.on is not None:
                tool = SWITCHES[tool].reader
            elif tool == "make_payment":
                tool = "check_payment_request"
            return self._call(request, tool, arguments)
        self._running = None
        if self._bar:
            self._replies.append(f"Status bar: {self._bar}.")
        if self._content and not (self._acted or self._consents):
            return UserAction(text=" ".join([*self._replies, THANKS]), stop=UserStop.STOP)
        return self._say(" ".join(self._replies) or CLARIFICATION)

    def _call(self, request: Request, tool: str, arguments: dict[str, Any]) -> UserAction:
        self._running = (request, tool)
        return UserAction(tool_calls=(ToolCall(tool, arguments),))

    def _say(self, text: str) -> UserAction:
        """Say something, or give up when too many turns in a row brought nothing new."""
        self._idle_turns = self._idle_turns + 1 if text in self._said else 0
        self._said.add(text)
        if self._idle_turns >= PATIENCE:
            return UserAction(text="This does not help me. Goodbye.", stop=UserStop.STOP)
        return UserAction(text=text)


def _persona_name(persona: str | None) -> str:
    """Return which of tau2's three personas a description is: none, the office administrator, or the uneasy retiree."""
    if not persona:
        return "none"
    return "hard" if "limited" in persona else "easy"


def _goal_name(reason: str) -> str:
    """Return what the caller wants: MMS, fast data, or any service."""
    return "mms" if "MMS" in reason else "speed" if "speed" in reason else "service"


def _own_words(text: str) -> list[str]:
    """Return the sentences of a scenario, which is told in the second person, in the first person."""
    text = re.sub(r"\bYou are\b", "I am", text)
    text = re.sub(r"\bYou mobile\b", "My mobile", text)  # sic, in every mobile data scenario
    text = re.sub(r"\bYou\b", "I", text)
    return [first_person(part) for part in re.split(r"(?<=\.)\s+", text.strip()) if part]
