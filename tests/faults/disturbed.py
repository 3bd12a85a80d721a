"""A run that takes seconds, and what two equal runs must share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sinkflex.config import Config
from sinkflex.recipe import load_config
from sinkflex.trajectory import read_trajectories

SMOKE = Path(__file__).parents[2] / "recipes" / "smoke.toml"
# Every token has a gradient: the rewards of a policy without skill are all equal, and would move nothing.
LEARNING = ("method.entropy_coefficient=1e-3", "method.kl_coefficient=0.05", "learner.micro_batch_tokens=1024")
# Without a warm start, which only telecom has.
SMALL = (
    *LEARNING,
    "env.domain=mock",
    "tasks.split=base",
    "validation.split=base",
    "warmup.steps=0",
    "env.max_turns=3",
    "train.steps=4",
    "train.checkpoint_every=2",
    "rollout.slots=8",
)


def smoke(directory: Path, *overrides: str) -> Config:
    """The smoke recipe in a directory, in a form that leaves equal bytes on any number of cores."""
    always = ("run.threads=1", 'log.writers=["jsonl"]', f"run.directory={directory}")
    return load_config(SMOKE, [*always, *overrides])


def learning_smoke(directory: Path, *overrides: str) -> Config:
    """The smoke recipe, made to learn something in every step."""
    return smoke(directory, *LEARNING, *overrides)


def small(directory: Path, *overrides: str) -> Config:
    """A few steps in the mock domain."""
    return smoke(directory, *SMALL, *overrides)


def results(directory: Path, last: int) -> dict[str, bytes]:
    """Everything that a finished run leaves, but wall-clock facts, its own path, and earlier checkpoints."""
    apart = {"timing.jsonl", "config.toml", "about.json", "SHA256SUMS", ".lock"}
    found = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in found.items()
        if name.name not in apart and (name.parts[0] != "checkpoints" or name.parts[1] == f"step_{last}")
    }


def consumed(directory: Path) -> Counter[str]:
    """Task ids of all training groups."""
    files = sorted((directory / "trajectories").glob("step_*.jsonl.zst"))
    return Counter(group.task_id for path in files for group in read_trajectories(path))


def require_equal(directory: Path, whole: Path, last: int) -> None:
    """Assert that a run that was disturbed has ended like one that was not."""
    ours, theirs = results(directory, last), results(whole, last)
    assert set(ours) == set(theirs)
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert consumed(directory) == consumed(whole)
    assert any(name.endswith("model.safetensors") for name in ours) and "metrics.jsonl" in ours
