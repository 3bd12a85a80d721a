"""`sinkflex check`: proves on a user's own recipe what the tests prove on ours, before a run is paid for.

Model, template, attention, environment and method are the recipe's; episodes are few and short. To add a check: write a
function in `checks/` that returns what it measured or raises `Broken`, and name it in CHECKS.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sinkflex.checks import attention, credit, gradients, tokens
from sinkflex.checks.subject import Broken, Subject, open_subject
from sinkflex.config import Config
from sinkflex.plain import plain

CHECKS: dict[str, Callable[[Subject], str]] = {
    "template increments": tokens.template,
    "mask is what was sampled": tokens.mask,
    "sampler equals learner": tokens.logprobs,
    "sinks live and learn": attention.sinks,
    "window": attention.window,
    "packing": attention.packing,
    "padding": attention.padding,
    "micro-batches": gradients.micro_batches,
    "order of rows": gradients.order,
    "episodes cut into rows": gradients.resplit,
    "ranks": gradients.ranks,
    "groups without variance": credit.silent_groups,
    "broken episodes": credit.broken_episodes,
    "engine noise": credit.engine_noise,
    "resume": gradients.resume,  # last: it moves the weights
}


def check(config: Config) -> Iterator[dict[str, Any]]:
    """Check a recipe.

    Yields:
        For each of CHECKS a record: check, result ("PASS" or "FAIL"), found, remedy ("" if passed), seconds.
    """
    with TemporaryDirectory() as folder:
        subject = open_subject(config, Path(folder))
        with subject.run:
            for name, prove in CHECKS.items():
                yield _record(name, prove, subject)


def report(config: Config, as_json: bool) -> int:
    """Check a recipe and print each record as it comes, or all of them as JSON; return the exit status."""
    records = []
    for record in check(config):
        records.append(record)
        if not as_json:
            print(plain(line(record)), flush=True)
    failed = sum(record["result"] == "FAIL" for record in records)
    print(json.dumps(records) if as_json else f"{failed} of {len(records)} checks fail", flush=True)
    return int(failed > 0)


def line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of the table, with what to do below it if it failed."""
    text = f"{record['result']}  {record['check']:<{max(map(len, CHECKS))}}  {record['found']}"
    return text + (f"\n      {record['remedy']}" if record["remedy"] else "")


def _record(name: str, prove: Callable[[Subject], str], subject: Subject) -> dict[str, Any]:
    started = time.perf_counter()
    result, remedy = "FAIL", "Read the message; if it does not help, report it with this table."
    try:
        result, found, remedy = "PASS", prove(subject), ""
    except Broken as broken:
        found, remedy = broken.found, broken.remedy
    except Exception as error:  # whatever breaks a promise is told like any other
        found = f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - started, 2)
    return {"check": name, "result": result, "found": found, "remedy": remedy, "seconds": seconds}
