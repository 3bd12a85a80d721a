"""What a customer hears in an agent's message: which topics are asked about, and what the agent does.

A message is read sentence by sentence, and a list counts with the sentence that introduces it.

    "Please provide your email.  I will return item 1234567890 of order #W1234567. Do you confirm (yes/no)?"
        topics asked about: identity             what the agent does: confirm
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_CHARACTERS = 8000  # what a person reads of one message; keeps a runaway agent message cheap

# Values that proposals name in words. A customer who wants one of them notices another.
CHOICES = {
    "payment": re.compile(r"credit[ _]card|gift[ _]card|paypal|certificate"),
    "reason": re.compile(r"no longer needed|ordered by mistake"),
    "cabin": re.compile(r"basic[ _]economy|economy|business"),
    "bags": re.compile(r"\b(\d+) (?:\w+ ){0,2}(?:bag|suitcase|luggage)"),
}

_SENTENCE = re.compile(r"(?<=[.!?])(?<!\n\d\.)\s+|\n\s*\n")  # but not after "1." of a list
_ASKS = re.compile(
    r"\?|\b(?:please|could you|can you|would you|let me know|tell me|share|specify|provide"
    r"|i(?:'ll| will| would| do)? (?:also )?(?:need|require)|may i have|what|which|remind me)\b"
)
_HAND_OVER = r"(?:human|agent|representative|supervisor|specialist|someone|team|department)"
_LOOK = r"(?:look|check|search|find|see|list|show|explain|pull)"
_MADE = (
    r"(?:cancel|return|exchang|modif|chang|updat|process|submit|complet|book|upgrad|downgrad|add|refund|initiat|request"
    r"|sent|issued|placed|adjust|remov|switch)"
)
# What an agent does in a sentence, as alternatives.
_ACTS = {
    "transfer": (
        r"\byou(?: are|'re| will be| have been|'ve been)(?: now)?(?: being)? transferred\b",
        r"\btransferring you\b",
        r"\b(?:i will|i'll|let me|going to) (?:now )?transfer you\b",
    ),
    "human": (rf"\b(?:transfer|connect|escalat|hand you)\w*\b.{{0,40}}\b{_HAND_OVER}\b",),
    "closing": (
        r"\banything else\b",
        r"\bany(?:thing)? (?:other|more|further) (?:\w+ )?(?:i|we|you|question|request)",
        r"\b(?:other|further|additional) (?:question|request|concern|help|assistance)",
    ),
    "offer": (
        rf"\b(?:shall|should|may|can) i (?:\w+ )?{_LOOK}\b",
        rf"\b(?:would you like|do you want) me to {_LOOK}\b",
    ),
    "confirm": (  # "confirm", but not "confirm your email" or "to confirm, could you ..."
        r"\bconfirm(?:ed|ation)?\b(?!,? (?:which|what|who|could|can|may|would|number|code|id"
        r"|your (?!cancel|choice|request|return|exchange|change|booking|decision)"
        r"|the (?:\w+ )?(?:id|number|name|email|e-mail|zip|code|method|address)\b))",
        r"\b(?:proceed|go ahead)\b.{0,20}\?",
        r"\byes\b.{0,12}\bno\b",
        r"\b(?:reply|answer|say|type|respond)\b.{0,15}\byes\b",
        r"\b(?:is|are|does|do) (?:this|that|these|everything|it) (?:all )?(?:look |sound )?"
        r"(?:correct|right|ok|okay|fine|good|acceptable)",
        r"\bdo you (?:agree|accept|approve)\b|\bwould you like (?:it|that|this)\b",
        r"\bare you (?:ok|okay|sure|happy)\b",
    ),
    "suggest": (  # "shall I cancel it?", but not "what would you like to cancel?" or "may I have your name?"
        r"^(?!.*\b(?:what|which|how|where|who|when|why)\b).*\b(?:shall|should|may|can) i (?:now |please |also )*+"
        r"(?!have|get|ask|know|see|help|assist)\w+",
        r"^(?!.*\b(?:what|which|how|where|who|when|why)\b).*\b(?:would you like|do you want|do you wish|are you ready)"
        r"(?: me)? to (?!provide|share|tell|know|give|use|pay)\w+",
    ),
    "missing": (
        r"\b(?:find|locate)\b.{0,40}\b(?:account|user|order|profile|reservation|customer|record|you)\b",
        r"\b(?:user|account|order|reservation|customer)\b.{0,40}\b(?:not found|does(?: not|n't) exist)\b",
        r"\bdouble.?check\b",
    ),
    "refusal": (
        r"\b(?:can(?:no|')t|can not|unable|impossible|unfortunately|out of stock|no longer available)\b",
        r"\b(?:could|did)(?:n't| not) find\b",
        r"\bnot (?:possible|able|allowed|permitted|eligible|available|found|offer|in stock)\b",
        r"\b(?:isn't|aren't|won't be)\b",
        r"\b(?:don't|do not|does not|doesn't) (?:allow|permit|offer|qualify|exist|have)\b",
        r"\bno such\b|\btoo (?:late|expensive)\b|\bagainst (?:our|the) policy\b",
    ),
    "done": (
        rf"\b(?:has|have) (?:now )?been (?:successfully )?{_MADE}",
        rf"\bi(?:'ve| have)(?: now| just| also)? {_MADE}",
        r"\bsuccessful|^done\b",
        r"\b(?:is|are|it's|that's) (?:now |all )*(?:done|completed?|cancell?ed|updated|booked|set)\b",
    ),
    "help": (
        r"\bhow (?:can|may) i (?:help|assist)\b",
        r"\bwhat (?:can|may) i (?:do|help)\b",
        r"\bwhat(?: is|'s| seems to be) the (?:problem|issue|matter)\b",
        r"\bwhat (?:brings you|would you like|do you (?:need|want))\b",
    ),
}
_PATTERNS = {act: re.compile("|".join(alternatives), re.DOTALL) for act, alternatives in _ACTS.items()}
ACTS = frozenset(_ACTS) - {"suggest", "transfer"}


@dataclass(frozen=True, slots=True)
class Heard:
    """An agent's message as the customer takes it in.

    Attributes:
        original: its first `MAX_CHARACTERS` characters.
        text: the same in lower case, with straight apostrophes.
        topics: what is asked about, and what the agent does: "transfer" and `ACTS`.
    """

    original: str
    text: str
    topics: frozenset[str]


def hear(message: str, topics: Mapping[str, re.Pattern[str]]) -> Heard:
    """Read an agent's message.

    Args:
        message: any text.
        topics: what can be asked about, by name.
    """
    original = message[:MAX_CHARACTERS]
    text = original.lower().replace("\u2019", "'")
    found: set[str] = set()
    asked: list[str] = []
    for sentence in _SENTENCE.split(text):
        act = _act(sentence)
        found.add(act)
        if act != "missing" and _PATTERNS["refusal"].search(sentence):
            found.add("refusal")
        if act in ("", "help", "done", "missing") and _ASKS.search(sentence):
            asked.append(sentence)
    questions = "\n".join(asked)
    found |= {name for name, pattern in topics.items() if pattern.search(questions)}
    return Heard(original, text, frozenset(found - {""}))


def _act(sentence: str) -> str:
    """Return what the agent does in a sentence, "" if it only tells, asks or refuses."""
    asks, refuses = "?" in sentence, _PATTERNS["refusal"].search(sentence)
    if _PATTERNS["transfer"].search(sentence) and not asks and not refuses:
        return "transfer"
    for act in ("human", "closing", "missing", "offer", "confirm", "suggest", "help", "done"):
        if act in ("human", "offer", "suggest", "help") and not asks:
            continue
        if _PATTERNS[act].search(sentence) and (act != "missing" or refuses or "double" in sentence):
            return "confirm" if act == "suggest" else act
    return ""
