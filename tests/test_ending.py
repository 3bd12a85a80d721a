"""What is said at the end of a command: nothing was left to do, nothing was learned, episodes were invalid."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sinkflex import cli
from sinkflex.config import Config
from sinkflex.envs.prompts import PromptEnv, read_examples
from sinkflex.recipe import load_config
from sinkflex.report.ending import remarks
from sinkflex.train import train
from tests.methods.small_run import SMALL, SMOKE

Here = Callable[..., tuple[int, str, str]]
# A method whose reward fails for one member of each group, or for all; an environment that fails for one prompt of two.
OWN = """
import json, pathlib
from sinkflex.envs.env import EnvironmentFault
from sinkflex.envs.prompts import PromptEnv
from sinkflex.methods.method import Method

class Sometimes(Method):
    async def reward(self, trajectory):
        if trajectory.member == 1:
            raise KeyError("no such thing")
        return await super().reward(trajectory)

class Always(Method):
    async def reward(self, trajectory):
        return trajectory.no_such_attribute

class Failing(PromptEnv):
    def step(self, action):
        if self._task.task_id == "test/2":
            raise EnvironmentFault("the judge is away")
        return super().step(action)

def env():
    prompts = pathlib.Path(__file__).with_suffix(".jsonl")
    if not prompts.exists():
        prompts.write_text("\\n".join(json.dumps({"prompt": text}) for text in ("Speak.", "Answer.")))
    return Failing({"train": prompts, "test": prompts}, lambda answer, example: 0.5, policy="", max_turns=1)
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Return a function that runs the command in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinkflex", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())  # type: ignore[return-value]

    yield run
    torch.use_deterministic_algorithms(False)


def words(directory: Path, *overrides: str) -> list[str]:
    options = [*SMALL, f"run.directory={directory}", *overrides]
    return [str(SMOKE), *(word for option in options for word in ("--set", option))]


def test_a_run_in_which_no_group_varies_says_so_once_and_what_to_do(here: Here, tmp_path: Path) -> None:
    status, _, error = here("train", *words(tmp_path))
    assert status == 0 and error.count("warning: ") == 1
    assert "warning: the weights did not change: in none of 2 steps" in error and "(mean reward 0)" in error
    assert "--set warmup.steps=N" in error and f"sinkflex export {tmp_path}/trajectories/step_2.jsonl.zst" in error
    assert here("export", f"{tmp_path}/trajectories/step_2.jsonl.zst", "--to", "text")[0] == 0
    weights = [tmp_path / folder / "model.safetensors" for folder in ("warm_start", "checkpoints/step_2/model")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    # A step without a record may have moved them.
    lines = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines(True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]), "utf-8")
    run: Any = SimpleNamespace(directory=tmp_path, step=2, before=1, config=load_config(SMOKE, []))
    assert remarks(run) == []

    # What moves the weights in another way is no reason to warn.
    assert "warning" not in here("train", *words(tmp_path / "more", "method.entropy_coefficient=0.01"))[2]


def test_a_run_that_is_finished_says_how_to_go_on(here: Here, tmp_path: Path) -> None:
    for command in ("train", "sft"):
        steps = ["train.steps=1"] if command == "train" else []
        directory = tmp_path / command
        assert "nothing was done" not in here(command, *words(directory, *steps))[2]
        error = here(command, *words(directory, *steps))[2]
        at = len(steps)
        assert error == (
            f"warning: nothing was done: {directory} is at step {at}, and train.steps = {at}. Type --set "
            f"train.steps={at + 10} to go on, or --set run.directory=FOLDER for another run\n"
        )
    assert json.loads(here("train", *words(tmp_path / "train", "train.steps=11"), "--json")[1])["step"] == 11


def test_invalid_episodes_are_told_with_their_commonest_cause(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_code.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    once = ["train.steps=1", "rollout.retries=0"]
    status, _, error = here("train", *words(tmp_path / "some", "method.name=failing_code:Sometimes", *once))
    cause = "KeyError: 'no such thing'"
    told = f"4 episodes of the run were invalid; of step 1: 4 of 16 episodes invalid; commonest (4 times): {cause}"
    assert status == 0 and error.count(told) == 1

    prompts = ["env.domain=failing_code:env", "env.max_turns=30", "tasks.split=train", "validation.split=test"]
    status, _, error = here("train", *words(tmp_path / "late", *prompts, *once))
    cause = "the judge is away"
    told = f"2 episodes of the run were invalid; of validation 1: 1 of 2 episodes invalid; commonest (1 times): {cause}"
    assert status == 0 and error.count(told) == 1

    shutil.rmtree(tmp_path / "late" / "trajectories")  # to have space, say
    status, out, error = here("train", *words(tmp_path / "late", *prompts, *once, "train.steps=2", "rollout.groups=1"))
    assert status == 0 and "step: 2" in out and "episodes of the run were invalid" in error

    with (tmp_path / "failing_code.jsonl").open("a") as file:
        file.write('\n{"prompt": "Speak again."}')
    read_examples.cache_clear()
    _, _, error = here("train", *words(tmp_path / "late", *prompts, *once, "train.steps=3"))
    assert "continuing" in error and "tasks: 1 new (train/3)\n" in error and "code" not in error.partition("tasks:")[0]

    status, _, error = here("train", *words(tmp_path / "all", "method.name=failing_code:Always", *once))
    assert status == 2 and "16 of 16 episodes of step 1 are invalid" in error
    assert "(16 times: AttributeError: 'Trajectory' object has no attribute 'no_such_attribute')" in error


@dataclass(frozen=True)
class Dated:
    """A task whose facts are no JSON."""

    task_id: str
    tags: Mapping[str, Any]
    example: Mapping[Any, Any]


class Calendar(PromptEnv):
    """Prompts as tasks of one's own kind."""

    def tasks(self, split: str) -> Any:
        return [Dated(t.task_id, {}, {date(2026, 1, 1): {1, 2}}) for t in super().tasks(split)]


def calendar() -> Calendar:
    return Calendar(dict.fromkeys(("train", "test"), "examples/own_prompts.jsonl"), lambda *_: 1.0, max_turns=1)


def test_tasks_of_ones_own_may_hold_anything(here: Here, tmp_path: Path) -> None:
    prompts = [f"env.domain={__name__}:calendar", "env.max_turns=30", "tasks.split=train", "validation.split=test"]
    for steps in (1, 2):
        status, _, error = here("train", *words(tmp_path, *prompts, f"train.steps={steps}"))
        assert status == 0 and ": tasks" not in error, error


def test_a_score_of_an_interrupted_run_says_which_step_it_is_of(here: Here, tmp_path: Path) -> None:
    tmp_path /= "a run"  # what is told to type is typed as it is
    config: Config = load_config(SMOKE, [*SMALL, f"run.directory={tmp_path}", "train.steps=3"])
    with pytest.raises(KeyboardInterrupt):
        train(config, interrupted=lambda: True)
    newest = f"{tmp_path}/checkpoints/step_1"
    shutil.copytree(newest, f"{newest}_copy")  # a person's own
    out = here("evaluate", str(tmp_path), "--split", "base")[1]
    assert f"\npolicy: {tmp_path}/checkpoints/step_0\n" in f"\n{out}"
    told = "checkpoint: step_0, the best that was validated; the newest is step_1: sinkflex evaluate "
    assert told in out
    command = shlex.split(out.partition("sinkflex evaluate ")[2].splitlines()[0])
    assert command[0] == f"{newest}/model"
    assert f"policy: {newest}/model\n" in here("evaluate", *command, "--split", "base")[1]
    train(config)
    assert (
        "checkpoint:"
        not in here("evaluate", f"{newest[:-1]}3/model", "--recipe", f"{tmp_path}/config.toml", "--split", "base")[1]
    )


def test_a_rollout_is_told_in_words(here: Here, tmp_path: Path) -> None:
    out = here("rollout", *words(tmp_path), "--episodes", "2")[1]
    assert out.startswith(f"policy: untrained\nfile: {tmp_path}/trajectories/rollout.jsonl.zst\nsuite: tau2/mock")
    assert "mean@1: 0" in out and "{" not in out and "\nstop reason " in out
