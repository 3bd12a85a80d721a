"""The parts of a run, each built as the recipe asks."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch

from sinkflex.config import Config, LearnerConfig
from sinkflex.envs.own import is_own, own_environment
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.episode import make_user
from sinkflex.learner.step import Learner
from sinkflex.methods.method import METHODS
from sinkflex.policy.chat import Chat
from sinkflex.policy.model import Policy
from sinkflex.policy.sampler import Sampler
from sinkflex.processes import processes
from sinkflex.rollout.deadline import Nursery
from sinkflex.rollout.remote import RemoteEnv, warm_up
from sinkflex.users.configured import configured_user


def open_workers(config: Config) -> Nursery:
    """Return where the environments of the recipe may live; it starts nothing before it is needed."""
    rewarding = METHODS.get(config.method.name, config.method.name) if config.method.reward_seconds else ""
    warm = partial(warm_up, config.env.domain, rewarding.partition(":")[0])
    return Nursery(warm, round(config.env.memory_gigabytes * 1e9))


def live_env(config: Config, workers: Nursery) -> Tau2Env | RemoteEnv:
    """Return a new environment of the recipe for rollouts, in a worker if its calls have a deadline."""
    seconds, domain = config.env.deadline_seconds, config.env.domain
    if not seconds:
        return make_env(config)
    # The environment itself goes to the worker, or its name: neither needs the imports of this file there.
    if is_own(domain):
        return RemoteEnv(workers, seconds, {}, own_environment, domain)
    env = make_env(config)
    known = {"domain": domain, "user": "none" if env.solo else make_user(env.user, domain).kind}
    remote = RemoteEnv(workers, seconds, known, copy, env)
    remote.waits = env.waits
    return remote


def make_env(config: Config, offline: bool = False) -> Tau2Env:
    """Return a new environment of the recipe.

    Args:
        config: the recipe.
        offline: with the scripted user, whoever the recipe's is: no server is asked, no code of others can hang.
    """
    env = config.env
    if is_own(env.domain):
        return own_environment(env.domain)
    return Tau2Env(
        domain=env.domain,
        solo=env.solo,
        user="scripted" if offline else configured_user(env),
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


def make_chat(config: Config, policy: Policy, env: Tau2Env) -> Chat:
    """Return the conversations of the recipe: the policy's template, the environment's rules and tools."""
    return Chat(policy.tokenizer, env.policy, chat_tools(config, env), config.rollout.window, config.prompt.tool_format)


def make_sampler(config: Config, policy: Policy, chat: Chat) -> Sampler:
    """Return the sampler of the recipe; a turn ends where the chat says."""
    rollouts = config.rollout
    return Sampler(
        policy.model,
        chat.stop_ids,
        slots=rollouts.slots,
        max_tokens=rollouts.max_tokens,
        max_turn_tokens=rollouts.max_turn_tokens,
    )


def make_learner(config: Config, policy: Policy, options: LearnerConfig, updates: int) -> Learner:
    """Return a learner whose log-probs are those of the sampling temperature."""
    copies = processes(config.run.processes, policy.model.device)
    return Learner(policy.model, options, updates * options.epochs, config.rollout.temperature, copies)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next step, which asks for the same: a tenth of an update's time."""
    with suppress(OSError, AttributeError):  # another system, another C library
        library = ctypes.CDLL(None)
        library.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: smaller blocks are not mapped anew each time
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free memory at the end of the heap stays
        library.mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, since those of others are given back each time


def set_up_torch(config: Config) -> None:
    """Set threads, memory and determinism for the process."""
    keep_freed_memory()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.use_deterministic_algorithms(config.run.deterministic)
    # It would also fill every new tensor, to show what reads one too early, at the cost of a pass over each.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (pyright does not know it)
