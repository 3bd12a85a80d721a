"""A run: everything a recipe asks for, built once, saved and restored as one piece."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from transformers import PreTrainedModel

from sinkflex import checkpoint
from sinkflex.build import live_env, make_chat, make_env, make_learner, make_sampler, open_workers, set_up_torch
from sinkflex.config import Config
from sinkflex.demonstrations import corpus
from sinkflex.learner.scorer import Scorer, require_vocabulary
from sinkflex.learner.step import Learner
from sinkflex.lock import free_directory, lock_directory
from sinkflex.methods.method import Method, build_method
from sinkflex.metrics import START, Metrics, open_metrics
from sinkflex.policy.chat import Chat
from sinkflex.policy.drafts import Drafts
from sinkflex.policy.lora import twin
from sinkflex.policy.model import Policy, continued_policy, load_policy, new_policy
from sinkflex.policy.sampler import Sampler
from sinkflex.processes import in_processes, processes, shares_of
from sinkflex.provenance import provenance
from sinkflex.recipe import dump_config
from sinkflex.rollout.deadline import Nursery
from sinkflex.rollout.group import Phase, gather, rollout
from sinkflex.scores import faults, summarize
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import infeasible_tasks, scored_tasks, training_tasks
from sinkflex.trajectory import Group

FIXED = ("model.tiny.", "env.domain ")  # options that a run keeps to its end


class Outage(ValueError):
    """Too many episodes are invalid to go on; the run has been saved as it was before them."""


@dataclass(slots=True)
class Run:
    """The parts of a run, a context manager: it closes its files and frees its directory.

    Attributes:
        step: finished updates; -1 means that the warm start is still to come.
        unlogged: the record of a step whose validation is still to come.
        before: at which point of the loop the latest rollouts began, and the drafts as they were then.
        workers: where environments live that have a deadline.
    """

    config: Config
    directory: Path
    policy: Policy
    chat: Chat
    sampler: Sampler
    learner: Learner
    method: Method
    tasks: TaskSampler
    metrics: Metrics
    lock: IO[str]
    workers: Nursery
    step: int = -1
    unlogged: dict[str, float] | None = None
    saved_step: int = -1
    before: tuple[tuple[int, bool], Drafts] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Outage) and (self.saved_step < self.step or self.unlogged is not None):
                if self.before is not None:
                    self.sampler.drafts = self.before[1]  # what an outage cut off leaves no trace
                self.save()
        finally:
            self.metrics.close()
            self.workers.close()
            free_directory(self.lock)

    def rollout(
        self, task_ids: list[str], group_size: int, purpose: str, temperature: float, trials: bool = False
    ) -> tuple[list[Group], dict[str, float]]:
        """Roll out groups with the current weights: siblings, or trials of a score."""
        point = (self.step, self.unlogged is None)
        if self.before is None or self.before[0] != point:
            self.before = point, self.sampler.drafts.copy()
        shares = shares_of(len(task_ids), processes(self.config.run.processes, self.sampler.device))
        done, episodes = [0], len(task_ids) * group_size

        def count(_: object) -> None:
            done[0] += len(shares)  # the other processes are as far, by and large
            self.metrics.doing(f"{purpose}: episode", min(done[0], episodes), episodes)

        phase = Phase(purpose, self.config.run.seed, self.step, self.step, temperature, trials)
        make, retries = partial(live_env, self.config, self.workers), self.config.rollout.retries

        def play_share(share: Sequence[int]) -> tuple[list[Group], dict[str, float]]:
            sampler, method = self.sampler, self.method
            before = pickle.dumps(method.state_dict()) if len(shares) > 1 else b""
            order = self.config.run.deterministic
            played = rollout(
                task_ids, group_size, make, self.chat, sampler, phase, count, method, retries, share, order
            )
            if len(shares) > 1 and pickle.dumps(method.state_dict()) != before:
                raise ValueError(
                    f"method {self.config.method.name} changes its state while it acts, which would be lost in a copy "
                    "of the process: type --set run.processes=1"
                )
            return played

        played = in_processes(play_share, shares)
        for groups, _ in played[1:]:
            for t in (t for group in groups for t in group.members):
                self.sampler.drafts.learn_episode(t.turns)
        return gather(played, shares)

    def require_valid(self, groups: list[Group], purpose: str) -> None:
        """Stop the run if faults ended too many of these episodes.

        Raises:
            Outage: with the causes, and how to go on.
        """
        causes, episodes = faults(groups), sum(len(group.members) for group in groups)
        limit = self.config.rollout.invalid_limit
        if causes.total() > limit * episodes or causes.total() == episodes:
            told = "; ".join(f"{count} times: {cause}" for cause, count in causes.most_common(3))
            raise Outage(
                f"{causes.total()} of {episodes} episodes of {purpose} are invalid, and rollout.invalid_limit is "
                f"{limit:g} ({told}). The run is saved as it was before them: remove the cause, then give the same "
                "command again."
            )

    def score(self, task_set: str, trials: int, temperature: float) -> tuple[dict[str, Any], list[Group]]:
        """Roll out a task set and summarize it."""
        task_ids = [task.task_id for task in scored_tasks(self.config.env.domain, task_set)]
        groups, _ = self.rollout(task_ids, trials, f"validation/{task_set}", temperature, trials=True)
        self.require_valid(groups, f"the validation on {task_set}")
        return summarize(groups), groups

    def scorer(self, reference: Callable[[], PreTrainedModel] | None = None) -> Scorer:
        """Return what scores rows and writes texts with the run's models, or with another reference."""
        after_warm_start = partial(self._frozen, self.directory / "warm_start")
        return Scorer(
            {"policy": lambda: self.policy.model, "reference": reference or after_warm_start},
            self._frozen,
            self.chat,
            self.sampler,
            self.config.rollout.temperature,
            self.config.learner.micro_batch_tokens,
        )

    def _frozen(self, folder: Path) -> PreTrainedModel:
        """Return the model of a folder, which must have the policy's vocabulary."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is gone, the policy that the method compares with: restore it, or start anew")
        if shared := twin(self.policy.model, folder):
            return shared
        other = load_policy(self.config, folder)
        require_vocabulary(self.policy.tokenizer, other.tokenizer, folder)
        return other.model.requires_grad_(False)

    def save(self, score: float | None = None) -> None:
        """Write a checkpoint of the finished step."""
        checkpoint.save(
            self.directory / "checkpoints",
            self.step,
            {
                "optimizer": self.learner.optimizer.state_dict(),
                "updates": self.learner.updates,
                "tasks": self.tasks.state_dict(),
                "method": self.method.state_dict(),
                "drafts": self.sampler.drafts.state_dict(),
                "metrics": self.metrics.state_dict(),
                "unlogged": self.unlogged,
            },
            provenance=provenance(self.config),
            folders={"model": self.policy.save},
            score=score,
            keep=self.config.train.keep_checkpoints,
        )
        self.saved_step = self.step

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take over everything but weights and metrics, which `open_run` has read already."""
        state = saved.state()
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.learner.updates = state["updates"]
        self.tasks.load_state_dict(state["tasks"])
        self.method.load_state_dict(state["method"])
        if "drafts" in state:  # not in checkpoints of earlier versions
            self.sampler.drafts.load_state_dict(state["drafts"])
        self.unlogged = state.get("unlogged")
        self.step = self.saved_step = saved.step


def open_run(config: Config) -> Run:
    """Build a run, or continue the one in its directory.

    Raises:
        ValueError: the method does not take these options, or another process works in the directory.
    """
    method = build_method(config.method.name, config.method.options, config.rollout.max_tokens)
    if method.needs_solo and not (config.env.solo and config.env.domain == "telecom"):
        raise ValueError(
            f'method.name = "{config.method.name}" gives credit by the gold calls of a telecom task that the agent '
            'works on alone. Type env.domain = "telecom" and env.solo = true.'
        )
    set_up_torch(config)
    directory = config.run_directory
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(directory)
    try:
        return _open_run(config, directory, method, lock)
    except BaseException:
        if is_new:
            shutil.rmtree(directory, ignore_errors=True)  # nothing of a run is in it yet
        free_directory(lock)
        raise


def _open_run(config: Config, directory: Path, method: Method, lock: IO[str]) -> Run:
    saved = checkpoint.latest(directory / "checkpoints")
    if saved is None:
        policy = new_policy(config, lambda: corpus(config))
        position = START
    else:
        for change in saved.changes(provenance(config)):
            if change.startswith(FIXED):
                raise ValueError(
                    f"{directory} holds a run, and {change}, which decides what a policy is. Take the change back, or "
                    "start anew with --set run.name=NEW"
                )
            print(f"continuing {directory}: {change}", file=sys.stderr)
        policy = continued_policy(config, saved.path / "model")
        position = saved.state()["metrics"]
    env = make_env(config)
    chat = make_chat(config, policy, env)
    tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
    run = Run(
        config=config,
        directory=directory,
        policy=policy,
        chat=chat,
        sampler=make_sampler(config, policy, chat),
        learner=make_learner(config, policy, config.learner, config.train.steps * config.learner.mini_batches),
        method=method,
        tasks=TaskSampler(tasks, config.tasks, config.run.seed, infeasible_tasks(config.env.domain, tasks)),
        metrics=open_metrics(config, directory, position),
        lock=lock,
        workers=open_workers(config),
    )
    if saved is not None:
        run.restore(saved)
    if run.step < config.train.steps:
        # From here on the run is what this config says; a finished one stays what it was.
        draft = directory / ".config.toml"
        draft.write_text(dump_config(config), encoding="utf-8")
        draft.replace(directory / "config.toml")
    return run
