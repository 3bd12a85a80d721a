"""Faults of a task that a program can find: the eight verdicts of River (arXiv 2608.22631) without its judge.

    task_trivial             an agent without skill is paid: a floor agent, or random calls in one of eight episodes
    verifier_too_weak        gold with one graded call left out, or with one argument changed, is paid too
    instr_verifier_mismatch  gold itself is not paid; alone, the ticket lacks a value that gold needs
    instr_env_mismatch       a gold call returns an error; an id in the instructions is in no database
    answer_leak              a value of a gold change stands in the policy or the tool schemas, and nowhere it should be
    instr_ambiguous          gold in an equivalent order is judged otherwise
    other                    the oracle fails twice; or the same calls, or the same state, are judged otherwise again
    clean                    none of these

A fault is what the check has found, in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from sinkflex.config import Verdict
from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.envs.tau2 import actions, policies, scoring, tasks
from sinkflex.envs.tau2.database import Environment, RecordTable, new_world, state_hash, template
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.episode import Tau2ToolCall
from sinkflex.envs.tau2.infeasible import TRANSFER
from sinkflex.rollout.scripted import Agent, play
from sinkflex.tasks.floors import FLOORS
from sinkflex.tasks.gold import changes
from sinkflex.tasks.oracle import oracle

RANDOM_EPISODES, RANDOM_CALLS = 8, 6
ORACLE_EPISODES = 2
# Arguments that are lists without an order: a reversed one means the same. Lists of one call are reversed together.
SETS = ("item_ids", "new_item_ids", "passengers", "payment_methods")
# What a change is made to. Changes to different ones can change places.
OBJECTS = ("order_id", "reservation_id")
_ID = {
    "retail": r"#W\d{7}|\b\d{10}\b|\b[a-z]+_[a-z]+_\d{4}\b|\b(?:credit_card|gift_card|paypal)_\d{7}\b",
    "airline": r"\b(?=[A-Z]*\d)(?=\d*[A-Z])[A-Z0-9]{6}\b|\bHAT\d{3}\b|\b[a-z]+_[a-z]+_\d{4}\b|"
    r"\b(?:credit_card|gift_card|certificate)_\d{7}\b",
    "telecom": r"\b\d{3}-\d{3}-\d{4}\b|\b[CLB]\d{4}\b",
    "mock": r"\b(?:task|user)_\d+\b",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A gold call: who makes it, and what."""

    actor: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of calls in a new world: the state, the tools' answers, the score."""

    world: Environment
    answers: tuple[tuple[str, bool], ...]
    score: scoring.Score

    @property
    def paid(self) -> bool:
        """True if the calls solve the task."""
        return self.score.reward == 1.0


@dataclass(frozen=True)
class Case:
    """A task under audit.

    Attributes:
        solo: as a ticket, without a user.
    """

    domain: str
    task_id: str
    solo: bool = False

    @cached_property
    def task(self) -> Any:
        """The package's task."""
        return tasks.read(self.domain, self.task_id)

    @cached_property
    def gold(self) -> tuple[Call, ...]:
        """The gold calls."""
        found = self.task.evaluation_criteria.actions or ()
        return tuple(Call(action.requestor, action.name, action.arguments) for action in found)

    @cached_property
    def replayed(self) -> Replay:
        """Gold in a new world."""
        return self.replay(self.gold)

    @cached_property
    def told(self) -> str:
        """What the agent can learn without a tool: the user's instructions, or the ticket."""
        return policies.ticket(self.task) if self.solo else str(self.task.user_scenario)

    def replay(self, calls: Sequence[Call]) -> Replay:
        """Make calls in a new world, say what is to be told, and score."""
        world = new_world(self.domain)
        scoring.initialize(world, self.task)
        made = [
            world.get_response(
                Tau2ToolCall.model_construct(id="", name=c.name, arguments=dict(c.arguments), requestor=c.actor)
            )
            for c in calls
        ]
        texts = ["; ".join(self.task.evaluation_criteria.communicate_info or ())]
        named = [ToolCall(c.name, c.arguments) for c in calls]
        score = scoring.score(self.domain, self.task, world, named, texts)
        return Replay(world, tuple((one.content or "", one.error) for one in made), score)

    def graded(self, index: int) -> bool:
        """True for a gold call that ought to matter: a change, a hand-over, or any call where calls are graded."""
        call = self.gold[index]
        return call.name == TRANSFER or changes(self.domain, call.name) or self.grades_calls

    @cached_property
    def grades_calls(self) -> bool:
        """True if the task is graded on the calls themselves."""
        return "ACTION" in {part.value for part in self.task.evaluation_criteria.reward_basis}

    def rewards(self, agents: Sequence[Agent]) -> Iterator[float]:
        """Play an episode with each agent; the seed is its index."""
        env = Tau2Env(self.domain, "base", self.solo, max_turns=200, max_errors=200)
        for seed, agent in enumerate(agents):
            yield play(env, agent, self.task_id, seed).reward


class RandomCalls:
    """Makes a few random calls with arguments of the right types, then does nothing."""

    def __init__(self, domain: str, solo: bool) -> None:
        self._env = Tau2Env(domain, "base", solo)
        self._idle = FLOORS["do_nothing"](solo)

    def reset(self, seed: int) -> None:
        """Start an episode."""
        self._env.action_space.seed(seed)
        self._left = RANDOM_CALLS

    def act(self, messages: list[Message]) -> Action:
        """Return random calls while there are any left."""
        while self._left:
            self._left -= 1
            action = self._env.action_space.sample()
            if action.tool_calls and actions.DONE not in {call.name for call in action.tool_calls}:
                return action
        return self._idle.act(messages)


def trivial(case: Case) -> str | None:
    """Who is paid without skill."""
    paid = [name for name, make in FLOORS.items() if next(case.rewards([make(case.solo)])) == 1.0]
    if "do_nothing" not in paid and any(case.rewards([RandomCalls(case.domain, case.solo)] * RANDOM_EPISODES)):
        paid.append("random_calls")
    return f"paid: {', '.join(paid)}" if paid else None


def too_weak(case: Case) -> str | None:
    """Which change of gold is paid as gold is."""
    if not case.replayed.paid:
        return None
    for i in filter(case.graded, range(len(case.gold))):
        call = case.gold[i]
        if case.replay([*case.gold[:i], *case.gold[i + 1 :]]).paid:
            return f"paid without call {i}, {call.name}"
        for key, other in _perturbed(case, call):
            if case.replay([*case.gold[:i], other, *case.gold[i + 1 :]]).paid:
                return f"paid with another {key} in call {i}, {call.name}"
    return None


def verifier_mismatch(case: Case) -> str | None:
    """What gold is not paid for, or what the ticket does not tell."""
    if not case.replayed.paid:
        failed = [name for name, value in case.replayed.score.parts.items() if not value]
        return f"gold is not paid: {', '.join(failed)}"
    if case.solo:
        for call in case.gold:
            for key, value in call.arguments.items():
                if _is_number(value) and _said(value, str(case.task.user_scenario)) and not _said(value, case.told):
                    return f"the ticket does not say {key} of {call.name}, which the user would"
    return None


def env_mismatch(case: Case) -> str | None:
    """Which gold call fails, or which id does not exist."""
    for i, (call, (_, error)) in enumerate(zip(case.gold, case.replayed.answers, strict=True)):
        if error:
            return f"gold call {i}, {call.name}, returns an error"
    known = _template_text(case.domain) + _own_text(case.replay(()).world)
    unknown = [name for name in re.findall(_ID[case.domain], case.told) if name.lstrip("#") not in known]
    return f"in no database: {', '.join(dict.fromkeys(unknown))}" if unknown else None


def leak(case: Case) -> str | None:
    """Which value of a gold change can be read where it should not be."""
    prompt = policies.policy(case.domain, case.solo, "full") + json.dumps(actions.agent_tools(case.domain, case.solo))
    heard = case.told
    for call, (answer, _) in zip(case.gold, case.replayed.answers, strict=True):
        if changes(case.domain, call.name) and call.actor == "assistant":
            for key, value in call.arguments.items():
                if _is_name(value) and value in prompt and value not in heard:
                    return f"the prompt holds {key} of {call.name}"
        heard += answer
    return None


def ambiguous(case: Case) -> str | None:
    """Which equivalent order of gold is judged otherwise."""
    for i, call in enumerate(case.gold):
        lists = {key: value[::-1] for key, value in call.arguments.items() if key in SETS and value != value[::-1]}
        if lists and changes(case.domain, call.name):
            turned = Call(call.actor, call.name, {**call.arguments, **lists})
            if case.replay([*case.gold[:i], turned, *case.gold[i + 1 :]]).paid != case.replayed.paid:
                return f"the order of {', '.join(lists)} decides in call {i}, {call.name}"
    made = [i for i, call in enumerate(case.gold) if changes(case.domain, call.name) and _object(call)]
    for first, second in pairwise(made):
        calls = list(case.gold)
        calls[first], calls[second] = calls[second], calls[first]
        if _object(calls[first]) != _object(calls[second]) and case.replay(calls).paid != case.replayed.paid:
            return f"the order of calls {first} and {second} decides"
    return None


def other(case: Case) -> str | None:
    """What else makes the task useless."""
    again = case.replay(case.gold)
    if (again.score, state_hash(again.world)) != (case.replayed.score, state_hash(case.replayed.world)):
        return "unstable: the same calls lead to another state"
    named = [ToolCall(call.name, call.arguments) for call in case.gold]
    texts = ["; ".join(case.task.evaluation_criteria.communicate_info or ())]
    if scoring.score(case.domain, case.task, again.world, named, texts) != again.score:
        return "unstable: the same state is scored otherwise"
    if not any(case.rewards([oracle(case.domain, case.task_id, case.solo)] * ORACLE_EPISODES)):
        return f"the oracle fails {ORACLE_EPISODES} times"
    return None


# In the order in which one names a task with several faults: what makes it wrong before what makes it easy.
CHECKS: dict[Verdict, Callable[[Case], str | None]] = {
    "instr_verifier_mismatch": verifier_mismatch,
    "instr_env_mismatch": env_mismatch,
    "answer_leak": leak,
    "task_trivial": trivial,
    "verifier_too_weak": too_weak,
    "instr_ambiguous": ambiguous,
    "other": other,
}


def _perturbed(case: Case, call: Call) -> Iterator[tuple[str, Call]]:
    """Yield (argument, the call with another value of it): the next one that gold gives it in another task."""
    if case.grades_calls and call.arguments:
        yield "argument, none at all,", Call(call.actor, call.name, {})
    if changes(case.domain, call.name):
        for key, value in call.arguments.items():
            known = _gold_values(case.domain).get((call.name, key), [])
            place = next((i for i, one in enumerate(known) if one == value), -1)
            if len(known) > 1:
                yield key, Call(call.actor, call.name, {**call.arguments, key: known[(place + 1) % len(known)]})


def _object(call: Call) -> Any:
    return next((call.arguments[key] for key in OBJECTS if key in call.arguments), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    """True for a text that looks like an id."""
    return isinstance(value, str) and len(value) > 4 and any(c.isdigit() for c in value)


def _said(number: float, text: str) -> bool:
    return any(float(found) == number for found in re.findall(r"\d+(?:\.\d+)?", text))


@cache
def _gold_values(domain: str) -> dict[tuple[str, str], list[Any]]:
    """Every value of each argument in the gold calls of the domain, in order, each once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for spec in tasks.load(domain, "base"):
        criteria: Any = tasks.read(domain, spec.task_id).evaluation_criteria
        for action in criteria.actions or ():
            for key, value in action.arguments.items():
                found.setdefault((action.name, key), {}).setdefault(repr(value), value)
    return {place: list(values.values()) for place, values in found.items()}


@cache
def _template_text(domain: str) -> str:
    """The domain's database as text."""
    return str([table.base if isinstance(table, RecordTable) else table for table in _tables(template(domain))])


def _own_text(world: Environment) -> str:
    """What a world has beside its template, as text."""
    return str([table.own if isinstance(table, RecordTable) else table for table in _tables(world)])


def _tables(world: Any) -> list[Any]:
    return [table for kit in (world.tools, world.user_tools) if kit for _, table in kit.db]
