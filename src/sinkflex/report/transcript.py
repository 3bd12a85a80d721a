"""Episodes as text to read: who said and called what, what came back, what is trained, what the reward is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from sinkflex.envs.env import Message, ToolCall
from sinkflex.trajectory import Group, Trajectory, Turn

_LEGEND = "Trained: the ids that the policy sampled, as many as stand in [brackets]. All else is context.\n"


def transcript(groups: Sequence[Group]) -> str:
    """Return all episodes, one after the other, in the order of groups and members."""
    return "\n".join([_LEGEND, *("\n".join(_lines(t)) + "\n" for group in groups for t in group.members)])


def _lines(t: Trajectory) -> Iterator[str]:
    yield f"=== {t.task_id}, member {t.member}: {t.outcome} ({t.stop_reason}), reward {_number(t.reward)}"
    parts = ", ".join(f"{name} {_number(value)}" for name, value in t.reward_parts.items())
    yield from [f"parts of the reward: {parts}"] if parts else []
    yield from [f"fault: {t.fault}"] if t.fault else []
    said = list(t.record)  # what the user does with tools of its own is there alone, and the agent's greeting
    # In files of earlier versions the user's first words are the opening.
    for message in t.opening or [message for _, message in said if message.role == "user"][:1]:
        yield from _heard(message, said, ("assistant", "user"))
    for turn in t.turns:
        yield from _turn(turn)
        for message in turn.observation:
            yield from _heard(message, said, ("user",))
    yield from _recorded(said, ("user",))


def _heard(message: Message, said: list[tuple[str, Message]], actors: Sequence[str]) -> Iterator[str]:
    """Yield a message and what these actors did before it; the record is used up to there, if the message is in it."""
    place = next((i for i, (_, other) in enumerate(said) if other == message), -1)
    yield from _recorded(said[: place + 1][:-1], actors)
    del said[: place + 1]
    yield from _message("agent" if message.role == "assistant" else message.role, message)


def _recorded(said: Sequence[tuple[str, Message]], actors: Sequence[str]) -> Iterator[str]:
    for actor, message in said:
        if actor in actors:
            who = "the user's tool" if (actor, message.role) == ("user", "tool") else message.role
            yield from _message("agent" if who == "assistant" else who, message)


def _turn(turn: Turn) -> Iterator[str]:
    """Yield what the policy did in a turn, as it was read from the ids, and what was done instead."""
    cut = ", cut off" if turn.finish == "length" else ""
    yield f"agent [{len(turn.action_ids)} tokens{cut}]: {turn.action.text or ''}".rstrip()
    yield from map(_call, turn.action.tool_calls)
    yield from [f"    cannot be read: {turn.action.error}"] if turn.action.error else []
    if turn.executed is not None:
        yield f"  done instead: {turn.executed.text or ''}".rstrip()
        yield from map(_call, turn.executed.tool_calls)


def _message(who: str, message: Message) -> Iterator[str]:
    """Yield what the user, a tool or the environment said."""
    yield f"{who}{' (error)' if message.error else ''}: {message.content}".rstrip()
    yield from map(_call, message.tool_calls)


def _call(call: ToolCall) -> str:
    return f"    calls {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
