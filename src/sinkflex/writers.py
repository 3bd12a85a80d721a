"""Where metrics go: the console, JSONL files, TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from sinkflex.config import Config
from sinkflex.plain import plain

# Names under it hold wall-clock facts, which no two runs share.
TIMING = "timing/"
QUIET_SECONDS = 1.0
# What the console shows of a record, with its short name.
_SHOWN = {
    "reward/mean": "reward",
    "validation/mean@1": "validation",
    "warmup/loss": "loss",
    "learner/loss": "loss",
    "reward/varied_groups_fraction": "varied groups",
    "rollout/turns_mean": "turns",
    "learner/ratio": "ratio",
    "rollout/invalid": "invalid",
    "timing/step_seconds": "seconds",
}


class Writer:
    """A place that metrics go to."""

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Take the record of a step."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make what was written so far safe."""

    def close(self) -> None:
        """Finish."""


class JsonlWriter(Writer):
    """`metrics.jsonl` and `timing.jsonl`: one JSON object a step in each.

    Args:
        directory: the run directory.
        records: how many to keep of what is there.
    """

    def __init__(self, directory: Path, records: int) -> None:
        self._files = []
        for name in ("metrics.jsonl", "timing.jsonl"):
            path = directory / name
            path.touch()
            kept = path.read_bytes().splitlines(keepends=True)[:records]
            if len(kept) < records:
                warnings.warn(f"{path} has {len(kept)} records, the checkpoint has seen {records}", stacklevel=2)
            file = path.open("r+b")
            file.truncate(sum(map(len, kept)))
            file.seek(0, os.SEEK_END)
            self._files.append(file)

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append the record, and pass it on to the system."""
        head = {"stage": stage, "step": step}
        timing = {name: value for name, value in values.items() if name.startswith(TIMING)}
        metrics = {name: value for name, value in values.items() if name not in timing}
        for file, part in zip(self._files, (metrics, timing), strict=True):
            file.write((json.dumps(head | part) + "\n").encode())
            file.flush()

    def sync(self) -> None:
        """Have the system write to the disk."""
        for file in self._files:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class ConsoleWriter(Writer):
    """A line a step on standard error; on a terminal also a live line: what is done now, reward so far, time left."""

    def __init__(self, config: Config) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._totals = {"warmup": config.warmup.steps, "train": config.train.steps}
        self._seen: dict[str, tuple[int, float]] = {}
        self._printed = 0.0
        self._reward = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, facts="")
        self._progress.start()

    def doing(self, what: str) -> None:
        """Show it in the live line."""
        self._progress.update(self._task, description=f"{plain(what):<32}")

    def say(self, text: str) -> None:
        """Print a line above the live line."""
        self._console.print(Text(plain(text)), soft_wrap=True)

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Print the most telling numbers of the record: of the first, the last, validations, else one a second."""
        total, shown = self._totals[stage], {}
        for name, short in _SHOWN.items():
            if name in values and (short != "invalid" or values[name]):
                shown.setdefault(short, values[name])
        numbers = "  ".join(f"{short} {value:.4g}" for short, value in shown.items())
        left = self._time_left(stage, step, total)
        telling = "validation" in shown or step in (1, total)
        if telling or time.monotonic() - self._printed > QUIET_SECONDS:
            self._printed = time.monotonic()
            self.say(f"{stage} {step}/{total}  {numbers}" + (f"  left {left}" if left else ""))
        self._reward = f"reward {values['reward/mean']:.3f}" if "reward/mean" in values else self._reward
        facts = "  ".join(fact for fact in (self._reward, f"left {left}" if left else "") if fact)
        self._progress.update(self._task, completed=step, total=total, facts=facts)

    def close(self) -> None:
        """Remove the live line."""
        self._progress.stop()

    def _time_left(self, stage: str, step: int, total: int) -> str:
        """Return minutes:seconds to the end of the stage at this process's mean pace; empty at first."""
        first_step, started = self._seen.setdefault(stage, (step, time.monotonic()))
        if step == first_step:
            return ""
        seconds = round((time.monotonic() - started) / (step - first_step) * (total - step))
        return f"{seconds // 60}:{seconds % 60:02d}"


class TensorBoardWriter(Writer):
    """Event files in `tensorboard/<stage>`; points that a resumed run draws again are hidden.

    Args:
        directory: the run directory.
        stage, step: the last record before this process.
    """

    def __init__(self, directory: Path, stage: str, step: int) -> None:
        self._make = _import("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._directory = directory / "tensorboard"
        self._purge = {stage: step + 1}
        self._writers: dict[str, Any] = {}

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        if stage not in self._writers:
            folder = str(self._directory / stage)
            self._writers[stage] = self._make(folder, purge_step=self._purge.get(stage, 0))
        for name, value in values.items():
            self._writers[stage].add_scalar(name, value, step)

    def sync(self) -> None:
        """Write what is buffered."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Write what is buffered."""
        for writer in self._writers.values():
            writer.close()


class TrackerWriter(Writer):
    """Weights & Biases, or Trackio, which has the same interface; a resumed run continues its curves.

    Args:
        package: "wandb" or "trackio".
        config: the run's config.
        directory: the run directory; its path identifies the run.
        records: records before this process.
    """

    def __init__(self, package: str, config: Config, directory: Path, records: int) -> None:
        self._module = _import(package, package, "sinkflex[trackers]")
        self._records = records
        identity = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=4).hexdigest()
        options: dict[str, Any] = {"project": "sinkflex", "config": config.flat(), "resume": "allow"}
        if package == "wandb":
            options |= {"id": identity, "name": config.run.name, "dir": str(directory)}
        else:
            options |= {"name": f"{config.run.name}-{identity}"}
        self._module.init(**options)

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log the record; the tracker's step counts records over both stages."""
        self._module.log({**values, f"{stage}/step": step}, step=self._records)
        self._records += 1

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


def _import(module: str, package: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f'log.writers has "{package}", which is not installed. Type: pip install "{install}", '
            f"or leave it out of log.writers. ({error})"
        ) from None
