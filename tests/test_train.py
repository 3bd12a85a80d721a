"""The loop on the real environment, small."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from sinkflex import checkpoint, demonstrations
from sinkflex.config import Config
from sinkflex.envs.env import EnvironmentFault
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.learner.step import Learner
from sinkflex.recipe import load_config
from sinkflex.run import open_run
from sinkflex.train import train, update_metrics, warm_start
from sinkflex.trajectory import Row

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
SMALL = (
    "run.threads=1",
    "warmup.steps=3",
    "warmup.demonstrations=4",
    "validation.split=base",
    "env.domain=telecom",
    "train.steps=4",
    "train.checkpoint_every=2",
    "rollout.slots=8",
    "env.max_turns=6",
    'log.writers=["jsonl"]',
)


def config(directory: Path, *overrides: str) -> Config:
    return load_config(SMOKE, [*SMALL, "validation.split=test", f"run.directory={directory}", *overrides])


def files(directory: Path) -> dict[str, bytes]:
    """Everything a run leaves that two equal runs must share: all but wall-clock facts and its own path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and path.name != "timing.jsonl"
        and "tensorboard" not in path.parts
        and path.name not in ("config.toml", "about.json", "SHA256SUMS")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "whole"
    train(config(directory))
    return directory


def test_two_runs_of_one_seed_leave_equal_bytes(whole: Path, tmp_path: Path) -> None:
    train(config(tmp_path / "again"))
    again, first = files(tmp_path / "again"), files(whole)
    assert set(first) == set(again)
    assert [name for name in first if first[name] != again[name]] == []
    assert any("step_4/model/model.safetensors" in name for name in first)


def test_another_seed_gives_another_run(whole: Path, tmp_path: Path) -> None:
    train(config(tmp_path / "other", "run.seed=1", "train.steps=1"))
    assert files(tmp_path / "other")["trajectories/step_1.jsonl.zst"] != files(whole)["trajectories/step_1.jsonl.zst"]


def test_a_run_stopped_and_continued_equals_one_that_never_stopped(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "stopped"

    def after_step_3() -> bool:
        return len((directory / "metrics.jsonl").read_text().splitlines()) >= 3 + 1 + 3

    with pytest.raises(KeyboardInterrupt):
        train(config(directory), interrupted=after_step_3)
    assert checkpoint.latest(directory / "checkpoints").step == 3  # type: ignore[union-attr]
    train(config(directory))
    stopped, first = files(directory), files(whole)
    final = [name for name in first if "checkpoints" not in name or "step_4" in name]
    assert [name for name in final if first[name] != stopped.get(name)] == []


def test_a_run_killed_between_checkpoints_repeats_the_lost_steps_to_the_bit(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "killed"

    def die() -> bool:
        if len((directory / "metrics.jsonl").read_text().splitlines()) >= 3 + 1 + 3:
            raise RuntimeError("killed")
        return False

    with pytest.raises(RuntimeError, match="killed"):
        train(config(directory), interrupted=die)
    assert checkpoint.latest(directory / "checkpoints").step == 2  # type: ignore[union-attr]
    train(config(directory))
    killed, first = files(directory), files(whole)
    final = [name for name in first if "checkpoints" not in name or "step_4" in name]
    assert [name for name in final if first[name] != killed.get(name)] == []


def test_metrics_have_one_record_a_step_and_the_floor_of_nothing_invalid(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["step"]) for r in records] == [("warmup", i) for i in (1, 2, 3)] + [
        ("train", i) for i in range(5)
    ]
    assert all(r["rollout/invalid"] == 0 for r in records[4:])
    assert "validation/mean@1" in records[3] and "validation/mean@1" in records[-1]


def test_the_first_update_of_a_batch_is_on_policy(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    gaps = [r["learner/log_ratio_abs_max"] for r in records if "learner/log_ratio_abs_max" in r]
    assert all(gap < 1e-4 for gap in gaps)


def test_a_fault_makes_an_episode_invalid_and_neither_a_reward_nor_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Tau2Env.step, [0]

    def sometimes_broken(self: Tau2Env, action: object) -> object:
        calls[0] += 1
        if calls[0] % 17 == 0:
            raise EnvironmentFault("the user's server died")
        return step(self, action)  # type: ignore[arg-type]

    run = train(config(tmp_path / "faulty", "train.steps=0", "rollout.retries=0"))
    monkeypatch.setattr(Tau2Env, "step", sometimes_broken)
    task_ids = [draw.task_id for draw in run.tasks.draw(4, 0)]
    groups, _ = run.rollout(task_ids, 4, "train", 1.0)
    broken = [t for g in groups for t in g.members if not t.valid]
    assert broken
    assert {t.fault for t in broken} == {"the user's server died"}
    assert all(t.reward is None for t in broken)
    assert all(len(a) == len(g.valid) for g in groups for a in [run.method.advantages(g)])


def test_every_sampled_id_of_a_rollout_is_in_its_row_and_nothing_else_is_trained(whole: Path, tmp_path: Path) -> None:
    run = train(config(tmp_path / "rows", "train.steps=0"))
    groups, _ = run.rollout([draw.task_id for draw in run.tasks.draw(3, 0)], 4, "train", 1.0)
    from sinkflex.learner.rows import rows_of

    rows = rows_of(groups, [run.method.advantages(g) for g in groups])
    sampled = [i for g in groups for t in g.valid for turn in t.turns for i in turn.action_ids]
    assert sampled == [int(i) for row in rows for i in row.token_ids[row.loss_mask]]
    for group in groups:
        for t in group.valid:
            messages, ids = [], []
            for turn in t.turns:
                ids += turn.prompt_ids + turn.action_ids
            text = run.policy.tokenizer.decode(ids)
            messages = [m.content for turn in t.turns[:-1] for m in turn.observation]
            assert all(content in text for content in messages)


def test_a_mini_batch_that_computes_nothing_hides_no_metric() -> None:
    idle = {"gradient_norm": 0.0, "learning_rate": 2.0, "tokens": 0}
    busy = {
        "loss": 0.5,
        "ratio": 1.1,
        "log_ratio_abs_max": 0.2,
        "gradient_norm": 1.0,
        "learning_rate": 1.0,
        "tokens": 7,
    }
    assert update_metrics([idle, busy]) == {
        "learner/gradient_norm": 0.5,
        "learner/learning_rate": 1.0,
        "learner/tokens": 7,
        "learner/loss": 0.5,
        "learner/ratio": 1.1,
        "learner/log_ratio_abs_max": 0.2,
    }
    assert update_metrics([]) == {}


def test_the_warm_start_checkpoints_layers_only_if_the_learner_does(tmp_path: Path) -> None:
    for wanted in (False, True):
        run = open_run(config(tmp_path / str(wanted), "warmup.steps=1", f"learner.checkpoint_layers={wanted}".lower()))
        with run:
            warm_start(run, lambda: False)
        assert any(getattr(m, "gradient_checkpointing", False) for m in run.policy.model.modules()) == wanted


def test_the_warm_start_shows_short_beginnings_first_where_the_domain_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = demonstrations.EVERYTHING
    stages = ((0.2, 1, every), (0.4, 2, every), (0.6, every, 700), (0.8, every, 1))
    monkeypatch.setattr(demonstrations, "STAGES", {"telecom": stages})
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Learner, "update", lambda self, rows, *_, **__: seen.append(measure(rows)) or Counter())
    played = ("warmup.steps=10", "warmup.demonstrations=10", "warmup.batch_tokens=20000")
    run = open_run(config(tmp_path, *played))
    with run:
        warm_start(run, lambda: False)
    assert [turns for turns, _ in seen[:4]] == [1, 1, 2, 2]
    assert all(turns > 2 and longest <= 700 for turns, longest in seen[4:6])
    for pair in (seen[6:8], seen[8:]):
        assert max(longest for _, longest in pair) > 700, "all are shown at the end, and where none is short enough"


def measure(rows: list[Row]) -> tuple[int, int]:
    assert rows and all(len(row) for row in rows)
    return max(int(row.turn_index[-1]) + 1 for row in rows), max(len(row) for row in rows)


def test_only_retail_shows_some_episodes_first() -> None:
    every = demonstrations.EVERYTHING
    stages = [demonstrations.stage("retail", done) for done in (0, 0.14, 0.15, 0.99)]
    assert stages == [(3, every), (3, every), (every, 1100), (every, 1100)]
    assert demonstrations.stage("telecom", 0) == (every, every)


def test_torch_is_told_to_be_deterministic(whole: Path) -> None:
    assert torch.are_deterministic_algorithms_enabled()
