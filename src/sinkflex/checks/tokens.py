"""Tokens: what the template renders, what is trained, and what probability both sides give it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sinkflex.build import make_env
from sinkflex.checks.subject import Broken, Subject, roll_out
from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.learner.logprobs import row_logprobs
from sinkflex.learner.packing import common_prefix
from sinkflex.learner.rows import rows_of
from sinkflex.learner.step import PROXIMAL
from sinkflex.policy.chat import assistant_message
from sinkflex.trajectory import Group, Row

TEMPERATURES = (0.6, 1.0, 1.3)
MEAN_GAP, MAX_GAP = 1e-4, 1e-2  # nats


def template(subject: Subject) -> str:
    """Ids added turn by turn equal one rendering of the whole conversation, or the turn forks."""
    chat, env = subject.run.chat, make_env(subject.run.config, offline=True)
    history = list(env.reset(seed=0, options={"task_id": subject.groups[0].task_id})[0])
    ids, forks, turns = chat.start(history), 0, _conversation([tool["function"]["name"] for tool in env.tools])
    env.close()
    for action, reply in turns:
        history.append(assistant_message(action))
        more, forked = chat.extend(history, reply, "stop")
        ids = more if forked else ids + chat.action_ids(action) + more
        forks += forked
        history += reply
        whole = chat.start(history)
        if not forked and ids != whole:
            place = common_prefix(ids, whole)
            ours, theirs = (chat.tokenizer.decode(x[max(place - 4, 0) : place + 8]) for x in (ids, whole))
            raise Broken(
                f"token {place}: turn by turn {ours!r}, in one rendering {theirs!r}",
                "The chat template of the model folder renders a turn by what comes after it: use the template the "
                "model was published with.",
            )
    return f"{len(turns)} turns, {len(ids)} ids" + (f", {forks} forks" if forks else "")


def _conversation(tools: list[str]) -> list[tuple[Action, tuple[Message, ...]]]:
    """Text, a call, two calls at once and an error, with unusual characters."""
    turns = [(Action(text="One  moment,\n\nplease. "), (Message("user", " I'm waiting…  \n"),))]
    if tools:
        first = ToolCall(tools[0], {"id": 'L"1'}, "call00001")
        second = ToolCall(tools[-1], {"n": 2, "on": True}, "call00002")
        turns += [
            (Action(tool_calls=(first,)), (Message("tool", '{"a": [1, 2]}\n', tool_call_id="call00001"),)),
            (
                Action(tool_calls=(first, second)),
                (
                    Message("tool", "Error: no such line", tool_call_id="call00001", error=True),
                    Message("tool", "done", tool_call_id="call00002"),
                ),
            ),
        ]
    return [*turns, (Action(text="It works."), (Message("user", "Thanks!"),))]


def mask(subject: Subject) -> str:
    """Each sampled id is trained once, with its own log-prob and the advantage of its trajectory; nothing else is.

    Also where every turn opens a new row.
    """
    _require_exact_rows([_forked(group) for group in subject.groups])
    rows = _require_exact_rows(subject.groups)
    return f"{sum(int(row.loss_mask.sum()) for row in rows)} sampled ids of {sum(map(len, rows))}, in {len(rows)} rows"


def _require_exact_rows(groups: list[Group]) -> list[Row]:
    advantages = [[np.full(t.sampled_tokens, 1 + i, np.float32) for i, t in enumerate(g.valid)] for g in groups]
    rows = rows_of(groups, advantages)
    turns = [turn for g in groups for t in g.valid for turn in t.turns]
    sampled = [pair for turn in turns for pair in zip(turn.action_ids, turn.behavior_logprobs, strict=True)]
    masks = [row.loss_mask for row in rows]
    ids, logprobs, given = (
        np.concatenate([getattr(row, name)[m] for row, m in zip(rows, masks, strict=True)])
        for name in ("token_ids", "behavior_logprobs", "advantages")
    )
    remedy = "This is a fault of sinkflex or of a change to it (learner/rows.py); report it with this table."
    if [i for i, _ in sampled] != ids.tolist():
        raise Broken(f"{len(sampled)} ids were sampled, {len(ids)} are trained, and they differ", remedy)
    if not np.allclose([p for _, p in sampled], logprobs, atol=1e-6):
        raise Broken("ids are paired with log-probs of others", remedy)
    if not np.array_equal(given, np.concatenate([a for of_group in advantages for a in of_group])):
        raise Broken("tokens do not carry the advantage of their own trajectory", remedy)
    if any(np.any(row.advantages[~m]) for row, m in zip(rows, masks, strict=True)):
        raise Broken("tokens that nobody sampled carry an advantage", remedy)
    return rows


def _forked(group: Group) -> Group:
    """The group as if each turn had rewritten the history."""
    members = [replace(t, turns=[replace(turn, forks=True) for turn in t.turns]) for t in group.valid]
    return Group(group.task_id, members)


def logprobs(subject: Subject) -> str:
    """Sampler and learner give one token the same probability, at any temperature."""
    run, found = subject.run, []
    for temperature in sorted({*TEMPERATURES, run.config.rollout.temperature}):
        groups = roll_out(run, temperature, tasks=1)
        rows = rows_of(groups, [[np.zeros(t.sampled_tokens, np.float32) for t in g.valid] for g in groups])
        if temperature == run.config.rollout.temperature:
            run.learner.recompute(rows)
            learner = [row.streams[PROXIMAL] for row in rows]
        else:
            learner = row_logprobs(run.policy.model, rows, temperature, run.config.learner.micro_batch_tokens)
        gap = np.concatenate([(x - row.behavior_logprobs)[row.loss_mask] for x, row in zip(learner, rows, strict=True)])
        mean, largest, ratio = np.abs(gap).mean(), np.abs(gap).max(), np.exp(gap).mean()
        said = f"T {temperature}: gap mean {mean:.1e}, max {largest:.1e}, ratio {ratio:.6f}"
        if not (mean <= MEAN_GAP and largest <= MAX_GAP):
            raise Broken(
                f"{said} over {len(gap)} tokens",
                "Training would start off-policy. If it is a model of your own, compare its use_cache=False and cached "
                "forward passes; if the gap appears away from one temperature alone, its scaling is wrong.",
            )
        found.append(said)
    return "; ".join(found)
