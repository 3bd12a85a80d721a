"""Exports: the package's own metrics and evaluator read ours and agree; tables hold every id and every message."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.sweep import SweepAgent
from sinkflex.report.export import export, tau2_results
from sinkflex.rollout.scripted import play
from sinkflex.scores import summarize
from sinkflex.tasks.suites import scored_tasks
from sinkflex.trajectory import (
    Group,
    Outcome,
    Trajectory,
    Turn,
    from_record,
    read_trajectories,
    write_trajectories,
)

TASKS = [task.task_id for task in scored_tasks("telecom", "test")]
TRIALS = 4


class Anything(types.ModuleType):
    """A module that has every name: the package imports litellm and calls it only for models."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def package() -> Iterator[Any]:
    """The package's metrics, results and evaluator."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("litellm", "litellm.caching", "litellm.caching.caching", "litellm.main"):
            patch.setitem(sys.modules, name, Anything(name))
        names = ("metrics.agent_metrics", "data_model.simulation", "evaluator.evaluator")
        yield types.SimpleNamespace(
            **{name.partition(".")[2]: importlib.import_module(f"tau2.{name}") for name in names}
        )


class Talker:
    """Retail: looks a customer up, talks, then loops until the customer leaves."""

    def reset(self, seed: int) -> None:
        self.turn = 0

    def act(self, messages: list[Message]) -> Action:
        self.turn += 1
        if self.turn == 2:
            return Action(tool_calls=(ToolCall("find_user_id_by_email", {"email": "nobody@example.com"}),))
        return Action(text="What is your email?")


def episode(
    task_id: str, member: int, seed: int, agent: Any, domain: str = "telecom", turns: int = 60, solo: bool = False
) -> Trajectory:
    dialogue = play(Tau2Env(domain, "base", max_turns=turns, solo=solo), agent, task_id, seed)
    info = dialogue.info
    outcome, stop, tags = Outcome(info["outcome"]), info["stop_reason"], info["tags"]
    parts, record, user = info["reward_parts"], list(info["record"]), info["user"]
    acts = [
        Turn([1, 2**40], [3, 4], [-0.5, -0.25], 7, action, observation) for action, observation in dialogue.exchanges
    ]
    return Trajectory(
        task_id, member, acts, outcome, stop, dialogue.reward, parts, user, seed, None, tags, domain, record
    )


def broken(old: Trajectory) -> Trajectory:
    return Trajectory(
        old.task_id,
        old.member,
        [],
        Outcome.INVALID,
        StopReason.FAULT,
        None,
        user="endpoint",
        fault="hung",
        domain=old.domain,
    )


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Forty tasks, four trials of a forgetful expert: about half are solved; some are cut off, one is invalid."""
    made = []
    for i, task_id in enumerate(TASKS):
        seeds = [100 * k + i for k in range(TRIALS)]
        agents = [SweepAgent(seed, omit=0.12) for seed in seeds]
        turns = 12 if i % 8 == 0 else 60
        made.append(Group(task_id, [episode(task_id, k, seeds[k], agents[k], turns=turns) for k in range(TRIALS)]))
    return made


@pytest.fixture(scope="module")
def path(groups: list[Group], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "trajectories" / "validation_10.jsonl.zst"
    write_trajectories(path, groups)
    write_trajectories(path.with_name("validation_9.jsonl.zst"), groups[:1])
    return path


def test_the_packages_own_metrics_equal_ours_to_the_last_digit(package: Any, groups: Any, path: Path) -> None:
    result = export(path.parent.parent, "tau2")
    assert result["source"] == str(path) and (result["episodes"], result["left_out"]) == (160, 0)
    theirs = package.agent_metrics.compute_metrics(package.simulation.Results.load(Path(result["file"])))
    ours = summarize(groups)
    assert 0.2 < ours["mean@1"] < 0.8 and len(set(ours["pass^k"].values())) == TRIALS
    assert theirs.pass_hat_ks == ours["pass^k"]
    assert theirs.avg_reward == ours["mean@1"]


def test_invalid_episodes_count_as_little_there_as_here(package: Any, groups: Any, tmp_path: Path) -> None:
    faulty = [Group(g.task_id, list(g.members)) for g in groups]
    faulty[3].members[1] = broken(faulty[3].members[1])
    faulty[5].members[:2] = [broken(t) for t in faulty[5].members[:2]]
    faulty[7].members = [broken(t) for t in faulty[7].members]
    write_trajectories(tmp_path / "t.jsonl.zst", faulty)
    result = export(tmp_path / "t.jsonl.zst", "tau2")
    assert (result["episodes"], result["left_out"]) == (160 - 7, 7)
    theirs = package.agent_metrics.compute_metrics(package.simulation.Results.load(Path(result["file"])))
    ours = summarize(faulty)
    assert list(ours["pass^k"]) == [1, 2] and ours["tasks"] == 39
    assert theirs.pass_hat_ks == pytest.approx(ours["pass^k"], rel=1e-15)


def test_the_packages_own_evaluator_gives_the_same_rewards(package: Any, groups: Any) -> None:
    chosen = [Group(g.task_id, g.members[:1]) for g in groups[:12]]
    retail = [Group(t, [episode(t, 0, 0, Talker(), "retail")]) for t in ("0", "11")]
    for domain, some in (("telecom", chosen), ("retail", retail)):
        results = package.simulation.Results.model_validate(tau2_results(some, "policy"))
        assert len({run.termination_reason for run in results.simulations}) >= (2 if domain == "telecom" else 1)
        for run, group in zip(results.simulations, some, strict=True):
            task = next(task for task in results.tasks if task.id == run.task_id)
            again = package.evaluator.evaluate_simulation(
                simulation=run,
                task=task,
                evaluation_type=package.evaluator.EvaluationType.ALL,
                solo_mode=False,
                domain=domain,
            )
            assert again.reward == run.reward_info.reward == group.members[0].reward
            if again.reward_breakdown:  # only where the task came to its own end
                assert again.reward_breakdown == run.reward_info.reward_breakdown


def test_users_calls_stops_and_reasons_are_in_the_messages(groups: Any) -> None:
    runs = tau2_results(groups[:8], "policy")["simulations"]
    by_reason = {run["termination_reason"]: run for run in runs}
    assert set(by_reason) == {"user_stop", "max_steps"}
    stopped = by_reason["user_stop"]["messages"]
    assert stopped[-1]["role"] == "user" and stopped[-1]["content"].endswith(("###STOP###", "###TRANSFER###"))
    assert by_reason["max_steps"]["messages"][-1]["content"] is None or "###" not in str(by_reason["max_steps"])
    own = [m for m in stopped if m["role"] == "user" and m["tool_calls"]]
    answers = {m["id"]: m for m in stopped if m["role"] == "tool"}
    assert own and all(call["requestor"] == "user" for m in own for call in m["tool_calls"])
    assert all(answers[call["id"]]["requestor"] == "user" for m in own for call in m["tool_calls"])


def test_a_silent_stop_and_a_solo_episode_can_be_exported(package: Any) -> None:
    t = episode("0", 0, 0, Talker(), "retail")
    said = t.record.pop()
    assert said[0] == "user"
    run = tau2_results([Group("0", [t])], "policy")["simulations"][0]
    assert run["messages"][-1]["content"] == "###STOP###" and run["messages"][-1]["role"] == "user"
    done = Action(tool_calls=(ToolCall("done"),))
    agent = types.SimpleNamespace(reset=lambda seed: None, act=lambda messages: done)
    solo = tau2_results([Group(TASKS[0], [episode(TASKS[0], 0, 0, agent, solo=True)])], "policy")
    results = package.simulation.Results.model_validate(solo)
    assert results.simulations[0].termination_reason.value == "agent_stop"
    assert "ticket" in results.info.environment_info.policy


def test_a_table_holds_every_episode_and_gives_it_back(groups: Any, path: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    faulty = [Group(groups[0].task_id, [groups[0].members[0], broken(groups[0].members[1])]), groups[1]]
    write_trajectories(tmp_path / "t.jsonl.zst", faulty)
    result = export(tmp_path / "t.jsonl.zst", "parquet", tmp_path / "new" / "out.parquet")
    assert (result["episodes"], result["left_out"]) == (6, 0)
    rows = parquet.read_table(result["file"]).to_pylist()
    assert [row["group"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[1]["reward"] is None and rows[1]["fault"] == "hung" and rows[1]["outcome"] == "invalid"
    first = groups[0].members[0]
    assert rows[0]["prompt_ids"] == [turn.prompt_ids for turn in first.turns]
    assert rows[0]["behavior_logprobs"] == [turn.behavior_logprobs for turn in first.turns]
    assert rows[0]["seed"] == first.seed and json.loads(rows[0]["tags"]) == first.tags
    for row, old in zip(rows, [t for g in faulty for t in g.members], strict=True):
        as_json = {name: json.loads(row[name]) for name in ("reward_parts", "tags", "opening", "record", "turns")}
        assert from_record(row | as_json) == old


def test_without_pyarrow_the_table_says_what_to_type(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="Type pip install pyarrow"):
        export(path, "parquet")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{run}", "tua2"), "there is no format 'tua2'. Did you mean tau2?"),
        (("{run}/nothing", "tau2"), "expected a run directory or a file of trajectories"),
        (("{run}", "tau2", "{run}/out.json"), "expected a file name that ends in .tau2.json"),
    ],
)
def test_a_mistake_says_what_to_type(path: Path, arguments: tuple[str, ...], words: str) -> None:
    run = str(path.parent.parent)
    source, to, *out = [text.format(run=run) for text in arguments]
    with pytest.raises(ValueError) as error:
        export(Path(source), to, Path(out[0]) if out else None)
    assert words in str(error.value)


def test_episodes_of_two_domains_or_of_none_are_refused(path: Path) -> None:
    old = read_trajectories(path)[0]
    with pytest.raises(ValueError, match="one tau2 domain, found"):
        tau2_results([old, Group("0", [episode("0", 0, 0, Talker(), "retail")])], "policy")
    old.members[0].domain = ""  # as in files of version 1
    with pytest.raises(ValueError, match="record them with evaluate --save"):
        tau2_results([Group(old.task_id, old.members[:1])], "policy")
