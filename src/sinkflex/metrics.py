"""Metrics: every logged name with its unit and meaning; `writers.py` has the places they go.

A run logs one record a step. Names that start with `timing/` hold wall-clock facts and go to `timing.jsonl`; all others
are equal in every run of the same seed and go to `metrics.jsonl`.

To add a metric: add a line to METRICS (a method calls `register` in its own file), then put the name into the values of
`Metrics.log`. An unknown name is an error, so that no number is logged whose meaning is not written down.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from sinkflex.config import Config
from sinkflex.writers import ConsoleWriter, JsonlWriter, TensorBoardWriter, TrackerWriter, Writer


class Metric(NamedTuple):
    """Unit and meaning of a logged number."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "mean over the valid episodes of the step"),
    "reward/solved_fraction": Metric("fraction", "valid episodes with the full reward"),
    "reward/varied_groups_fraction": Metric("fraction", "groups whose rewards differ, the only ones that teach GRPO"),
    "reward/part/*": Metric("reward", "mean of one part of the reward"),
    "rollout/episodes": Metric("episodes", "episodes of the step"),
    "rollout/invalid": Metric("episodes", "episodes that a fault ended, also when retried; they count nowhere else"),
    "rollout/invalid/*": Metric("episodes", "those of one kind of fault"),
    "rollout/retried": Metric("episodes", "attempts that a fault ended and that were made again"),
    "rollout/lone_groups": Metric("groups", "groups that faults left with less than two members: they teach nothing"),
    "rollout/stop/*": Metric("fraction", "episodes that ended for this reason"),
    "rollout/turns_mean": Metric("turns", "agent turns of an episode"),
    "rollout/sampled_tokens": Metric("tokens", "tokens the policy sampled"),
    "rollout/prefilled_tokens": Metric("tokens", "prompt tokens the sampler computed"),
    "rollout/copied_tokens": Metric("tokens", "prompt tokens it took from its cache instead"),
    "rollout/rejected_tokens": Metric("tokens", "tokens it guessed and did not sample"),
    "rollout/parse_errors_fraction": Metric("fraction", "turns that could not be parsed"),
    "tasks/pass_rate/*": Metric("reward", "moving average of a bucket of tasks"),
    "tasks/replays": Metric("episodes", "earlier successes that joined the step's groups (DTAC)"),
    "tasks/infeasible_recognized": Metric(
        "fraction", "episodes of infeasible tasks that say so and change nothing (DTAC)"
    ),
    "tasks/stored": Metric("episodes", "successes that may still be replayed (DTAC)"),
    "tasks/left_out": Metric("tasks", "tasks left out since their pass rate is outside `tasks.pass_band`"),
    "learner/loss": Metric("loss", "of the method, summed over the step's mini-batches"),
    "learner/ratio": Metric(
        "ratio", "mean of policy to behavior (with a correction: proximal) probability over sampled tokens"
    ),
    "learner/clipped": Metric("fraction", "sampled tokens whose ratio was clipped"),
    "learner/log_ratio_abs_max": Metric("nats", "largest difference of policy and behavior log-probs"),
    "learner/importance_weight": Metric("ratio", "mean of proximal to behavior probability, before it is bounded"),
    "learner/importance_weight_squared": Metric(
        "ratio", "mean square of it; the effective share of the tokens is importance_weight^2 / this"
    ),
    "learner/corrected": Metric("fraction", "sampled tokens whose importance weight was bounded"),
    "learner/kl": Metric("nats", "estimate against the reference (method.kl_estimator), mean over sampled tokens"),
    "learner/entropy": Metric("nats", "sampled estimate: mean of minus the policy log-prob over sampled tokens"),
    "learner/gradient_norm": Metric("norm", "before clipping"),
    "learner/learning_rate": Metric("rate", "of the last update"),
    "learner/tokens": Metric("tokens", "sampled tokens that count in the loss"),
    "learner/row_tokens": Metric("tokens", "tokens of all rows, shared ones counted in each"),
    "learner/unique_tokens": Metric("tokens", "tokens computed, shared ones once"),
    "warmup/loss": Metric("nats", "negative log-likelihood of the expert's tokens"),
    "warmup/gradient_norm": Metric("norm", "before clipping"),
    "warmup/learning_rate": Metric("rate", "of the update"),
    "validation/mean@1": Metric("reward", "mean reward of one episode a task on validation.split: the score"),
    "validation/*/mean@1": Metric("reward", "the same on another task set"),
    "validation/invalid": Metric("episodes", "validation episodes that a fault ended"),
    "timing/step_seconds": Metric("seconds", "a whole step"),
    "timing/rollout_seconds": Metric("seconds", "rolling out"),
    "timing/environment_seconds": Metric("seconds", "environments and users, within the rollout"),
    "timing/prefill_seconds": Metric("seconds", "the sampler's passes within the rollout: the share of prompt tokens"),
    "timing/decode_seconds": Metric("seconds", "the same: the share of sampled and of drafted tokens"),
    "timing/score_seconds": Metric("seconds", "advantages, and what other models say"),
    "timing/update_seconds": Metric("seconds", "updating the weights"),
    "timing/validation_seconds": Metric("seconds", "validating"),
    "timing/peak_memory_bytes": Metric("bytes", "largest memory so far: of the process, or of the GPU if there is one"),
}


def register(name: str, unit: str, meaning: str) -> None:
    """Add a metric of a method or of the user's own code; `*` in the name stands for any text.

    Raises:
        ValueError: the name has another meaning already.
    """
    metric = Metric(unit, meaning)
    if METRICS.setdefault(name, metric) != metric:
        raise ValueError(f"metric {name} is registered already, as: {METRICS[name].meaning}. Choose another name.")


def describe(name: str) -> Metric:
    """Return unit and meaning of a logged name.

    Raises:
        ValueError: nobody registered it.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        if "*" in pattern and fnmatch.fnmatchcase(name, pattern):
            return metric
    raise ValueError(f"metric {name} is not registered: add it to METRICS, or call register({name!r}, unit, meaning)")


START = {"records": 0, "stage": "", "step": -1}


class Metrics:
    """Checks records, and passes them to the writers. A context manager.

    Args:
        writers: where records go.
        console: shows what the run is doing; None to be silent.
        position: `state_dict()` of the process it continues.
    """

    def __init__(
        self, writers: Sequence[Writer], console: ConsoleWriter | None = None, position: Mapping[str, Any] = START
    ) -> None:
        self._writers = writers
        self._console = console
        self._records, self._stage, self._step = position["records"], position["stage"], position["step"]

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write the record of a step, once.

        Args:
            stage: "warmup" or "train".
            step: steps done in this stage; 0 is before the first.
            values: {registered name: finite number}.

        Raises:
            ValueError: an unregistered name, or a number that is not finite.
        """
        assert stage != self._stage or step > self._step, f"{stage} step {step} was logged already"
        record = {}
        for name, value in values.items():
            describe(name)
            record[name] = value if isinstance(value, int) else float(value)
            if not math.isfinite(record[name]):
                raise ValueError(f"metric {name} is {value} at {stage} step {step}; leave out what is undefined")
        for writer in self._writers:
            writer.write(stage, step, record)
        self._stage, self._step = stage, step
        self._records += 1

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show what the run is doing now ("rolling out", 40, 112)."""
        if self._console:
            self._console.doing(f"{what} {done}/{total}" if total else what)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, after everything logged so far is safe on disk."""
        for writer in self._writers:
            writer.sync()
        return {"records": self._records, "stage": self._stage, "step": self._step}

    def close(self) -> None:
        """Close all writers."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_metrics(config: Config, directory: Path, position: Mapping[str, Any] = START) -> Metrics:
    """Open the writers of `log.writers`.

    Args:
        config: the run's config.
        directory: the run directory.
        position: `Metrics.state_dict()` of the checkpoint to continue from; files are cut back to it.

    Raises:
        ValueError: a writer's package is not installed.
    """
    makers: dict[str, Callable[[], Writer]] = {
        "jsonl": lambda: JsonlWriter(directory, position["records"]),
        "console": lambda: ConsoleWriter(config),
        "tensorboard": lambda: TensorBoardWriter(directory, position["stage"], position["step"]),
        "wandb": lambda: TrackerWriter("wandb", config, directory, position["records"]),
        "trackio": lambda: TrackerWriter("trackio", config, directory, position["records"]),
    }
    writers = [makers[name]() for name in config.log.writers]
    console = next((writer for writer in writers if isinstance(writer, ConsoleWriter)), None)
    return Metrics(writers, console, position)
