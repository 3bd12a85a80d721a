"""No prompt of a run holds a task's answer: canaries in gold fields, and every id the sampler is ever given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tau2.data_model.tasks import Task

from sinkflex.envs.tau2 import tasks
from sinkflex.learner.scorer import insert
from sinkflex.policy.sampler import Sampler, Stream
from sinkflex.train import train
from sinkflex.trajectory import Row
from tests.methods.small_run import small

CANARY = "canary7731"
RUNS = {
    "pats by rule": ("pats", "method.least_tasks=1", 'method.seed_entries=["Look first."]'),
    "pats by policy": ("pats", "method.least_tasks=1", 'method.reviewer="policy"'),
    "seed by rule": ("seed", 'method.analyzer="rule"'),
    "seed by policy": ("seed", 'method.analyzer="policy"', "method.lesson_tokens=10"),
}


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every task's criteria of evaluation hold a canary wherever free text stands."""

    def planted(domain: str) -> dict[str, str]:
        texts = {}
        for task_id, text in original(domain).items():
            task = Task.model_validate_json(text)
            if task.evaluation_criteria is not None:
                task.evaluation_criteria.communicate_info = [CANARY]
                task.evaluation_criteria.nl_assertions = [CANARY]
                for action in task.evaluation_criteria.actions or ():
                    action.info = CANARY
            texts[task_id] = task.model_dump_json()
        return texts

    original = tasks._texts
    monkeypatch.setattr(tasks, "_texts", planted)
    tasks.read.cache_clear()
    yield
    tasks.read.cache_clear()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("canaries")
def test_no_prompt_of_a_run_holds_the_answer(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    opened, extended = Sampler.open, Sampler.extend

    def open_(self: Sampler, ids: Sequence[int], draws: Any) -> Stream:
        given.extend(ids)
        return opened(self, ids, draws)

    def extend(self: Sampler, stream: Stream, ids: Sequence[int]) -> None:
        given.extend(ids)
        extended(self, stream, ids)

    def inserted(row: Row, at: int, ids: Sequence[int]) -> Row:
        given.extend(ids)
        return insert(row, at, ids)

    monkeypatch.setattr("sinkflex.methods.seed.insert", inserted)
    monkeypatch.setattr(Sampler, "open", open_)
    monkeypatch.setattr(Sampler, "extend", extend)
    method, *options = RUNS[run]
    found = train(small(tmp_path, method, *options))
    text = str(found.policy.tokenizer.decode(given))
    assert len(text) > 10_000 and CANARY not in text
    assert ("Advice: This" in text) == (run == "seed by rule")
    assert CANARY in tasks.read("mock", "create_task_1").model_dump_json(), "it is there to be found"
