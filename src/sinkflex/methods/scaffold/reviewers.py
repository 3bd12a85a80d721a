"""PATS' evidence and its readers: what a step's groups show of a task type, and who makes edits of it.

A card holds only what the agent itself saw or did, and the mean reward of its group. Neither the task's answer, nor its
name (which in telecom lists the faults), nor the parts of its reward are on it. The schema is ours: the paper's is not
known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sinkflex.behavior import command, repeated
from sinkflex.config import EndpointConfig
from sinkflex.envs.env import Message
from sinkflex.methods.scaffold.bank import BUDGETS, MAX_EDITS, MAX_LETTERS, Bank, Edit, Mode
from sinkflex.trajectory import Group, Trajectory, Turn
from sinkflex.users.configured import server_of

TRACE_LINES, LINE_LETTERS = 12, 120
Ask = Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class Card:
    """What one group shows.

    Attributes:
        task: number of the task among the cards of its step; cards of one task have one number.
        goal: what the user said first, if anybody did.
        score: mean reward of the valid members, `members` of them.
        low, high: the longest trace with the lowest reward, and the shortest with the highest, one line a turn.
        helped, harmed: calls made in the high trace alone, and in the low one alone; empty where all rewards agree.
        errors: calls that were answered with an error in the low trace.
        repeated: calls that the low trace repeats with the same result.
    """

    task: int
    goal: str
    score: float
    members: int
    all_failed: bool
    all_passed: bool
    low: tuple[str, ...]
    high: tuple[str, ...]
    helped: tuple[str, ...] = ()
    harmed: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()


def card_of(group: Group, task: int) -> Card | None:
    """Return the card of a group, or None if faults ended all of its episodes."""
    valid = group.valid
    if not valid:
        return None
    rewards = [float(t.reward or 0.0) for t in valid]
    low = max((t for t, r in zip(valid, rewards, strict=True) if r == min(rewards)), key=lambda t: len(t.turns))
    high = min((t for t, r in zip(valid, rewards, strict=True) if r == max(rewards)), key=lambda t: len(t.turns))
    mine, its = _calls(low), _calls(high)
    differ = min(rewards) < max(rewards)
    loops = [turn for turn, again in zip(low.turns, repeated(low.turns), strict=True) if again]
    goal = next((m.content for actor, m in valid[0].record if actor == "user" and m.content), "")
    return Card(
        task=task,
        goal=goal[:LINE_LETTERS],
        score=float(np.mean(rewards)),
        members=len(valid),
        all_failed=max(rewards) < 1,
        all_passed=min(rewards) >= 1,
        low=_trace(low),
        high=_trace(high),
        helped=tuple(name for name in its if differ and name not in mine),
        harmed=tuple(name for name in mine if differ and name not in its),
        errors=tuple(dict.fromkeys(c.name for t in low.turns if _failed(t) for c in t.action.tool_calls)),
        repeated=tuple(dict.fromkeys(call.name for turn in loops for call in turn.action.tool_calls)),
    )


def rule(mode: Mode, cards: Sequence[Card], bank: Bank, least: int) -> list[Edit]:
    """Edit by rules that read nothing but cards: what told good traces from bad ones in several tasks.

    Args:
        mode: what may be done.
        cards: the evidence.
        bank: the entries as they are.
        least: tasks an edit must rest on.
    """
    everyone = tuple(range(len(cards)))
    if mode == "prune" or (mode == "compress" and _tasks(cards, everyone) >= least):
        newest = sorted(bank.entries, reverse=True)[: 1 if mode == "compress" else MAX_EDITS]
        return [Edit("delete", everyone, entry) for entry in newest]
    if mode == "compress":
        return []
    harmed = _cited(cards, "harmed", least)
    skills = [entry for entry, (kind, _) in bank.entries.items() if kind == "skill"]
    edits = [
        Edit("delete", cites, entry)
        for entry in skills
        for name, cites in harmed.items()
        if name in bank.entries[entry][1].split()
    ][:1]
    known = {text for _, text in bank.entries.values()}
    most_skills, _, most_mistakes = BUDGETS[mode]
    return [
        *edits,
        *[edit for edit in _skills(cards, least) if edit.text not in known][:most_skills],
        *[edit for edit in _mistakes(cards, least) if edit.text not in known][:most_mistakes],
    ]


def _skills(cards: Sequence[Card], least: int) -> list[Edit]:
    """What helped; where nothing did and all failed, a piece of general advice."""
    helped = _cited(cards, "helped", least)
    failed = tuple(i for i, card in enumerate(cards) if card.all_failed)
    if not helped and _tasks(cards, failed) >= least:
        text = "Take another remedy in each turn, and look whether it helped before you end."
        return [Edit("add", failed, kind="general", text=text)]
    return [
        Edit("add", cites, kind="skill", text=f"Calling {name} solved such tasks.") for name, cites in helped.items()
    ]


def _mistakes(cards: Sequence[Card], least: int) -> list[Edit]:
    texts = {
        "repeated": "Repeating {} changes nothing.",
        "errors": "{} was refused: check arguments.",
    }
    return [
        Edit("add", cites, kind="mistake", text=text.format(name))
        for field, text in texts.items()
        for name, cites in _cited(cards, field, least).items()
    ]


def endpoint(config: EndpointConfig) -> Ask:
    """Return what asks the model on a server.

    Raises:
        ValueError: the section names no server that can be used.
    """
    server = server_of(config, "method.endpoint")

    def ask(messages: list[Message]) -> str:
        body = {
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "temperature": config.temperature,
        }
        return server.complete(body, lambda message: str(message.get("content") or ""))

    return ask


def review_prompt(mode: Mode, cards: Sequence[Card], bank: Bank) -> list[Message]:
    """Return what a model is asked: its task, the budget of the mode, the bank and the cards."""
    skills, general, mistakes = BUDGETS[mode]
    system = (
        "You keep a short list of advice for an agent that calls tools. Answer with one JSON object and nothing else: "
        '{"operations": [{"op": "ADD", "kind": "skill", "text": "...", "cites": [0, 1]}, '
        '{"op": "UPDATE", "id": 3, "text": "...", "cites": [0, 2]}, {"op": "DELETE", "id": 4, "cites": [0, 1]}]}. '
        "A kind is general, skill or mistake. Each operation cites the numbers of at least two cards. "
        f"The mode is {mode}: at most {skills} new skills, {general} of them general, and {mistakes} new mistakes; at "
        f"most {MAX_EDITS} operations; a text has at most {MAX_LETTERS} letters."
        + (" The list must become shorter." if mode in ("compress", "prune") else "")
    )
    entries = [{"id": number, "kind": kind, "text": text} for number, (kind, text) in bank.entries.items()]
    shown = [{"card": number, **asdict(card)} for number, card in enumerate(cards)]
    return [Message("system", system), Message("user", json.dumps({"entries": entries, "cards": shown}))]


def read_edits(text: str) -> list[Edit]:
    """Read a model's answer.

    Raises:
        ValueError: it holds no JSON object of operations.
    """
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])["operations"]
        return [_edit(operation) for operation in found]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no operations can be read ({type(error).__name__})") from None


def _edit(operation: Mapping[str, Any]) -> Edit:
    cites = tuple(int(card) for card in operation.get("cites", ()))
    entry = int(operation.get("id", -1))
    return Edit(operation["op"].lower(), cites, entry, str(operation.get("kind", "")), str(operation.get("text", "")))


def _cited(cards: Sequence[Card], name: str, least: int) -> dict[str, tuple[int, ...]]:
    """Return which cards say so of each call, for calls of enough tasks, most cards first."""
    found: dict[str, list[int]] = {}
    for number, card in enumerate(cards):
        for call in getattr(card, name):
            found.setdefault(call, []).append(number)
    enough = {call: tuple(cites) for call, cites in found.items() if _tasks(cards, cites) >= least}
    return dict(sorted(enough.items(), key=lambda item: -len(item[1])))


def _tasks(cards: Sequence[Card], cites: Sequence[int]) -> int:
    return len({cards[card].task for card in cites})


def _calls(trajectory: Trajectory) -> dict[str, None]:
    return dict.fromkeys(call.name for turn in trajectory.turns for call in turn.action.tool_calls)


def _failed(turn: Turn) -> bool:
    return any(message.error for message in turn.observation)


def _trace(trajectory: Trajectory) -> tuple[str, ...]:
    lines = [command(turn)[:LINE_LETTERS] + (" -> error" if _failed(turn) else "") for turn in trajectory.turns]
    return tuple(lines[-TRACE_LINES:])
