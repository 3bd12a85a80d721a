"""Which options exclude each other, and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from sinkflex.config import OWN_SPLITS, SPLITS, USERS, Config, EnvConfig
from sinkflex.envs.own import is_own


def contradictions(config: Config) -> Iterator[tuple[bool, str]]:
    """Yield (is it so?, text) for every pair of options that cannot both hold."""
    tiny, rollout, learner = config.model.tiny, config.rollout, config.learner
    yield (
        tiny.heads % tiny.kv_heads != 0,
        f"model.tiny.heads = {tiny.heads} is not a multiple of model.tiny.kv_heads = {tiny.kv_heads}. "
        f"Type model.tiny.kv_heads = {tiny.heads} or a divisor of it.",
    )
    yield tiny.head_dim % 2 != 0, f"model.tiny.head_dim = {tiny.head_dim} is odd. Type {tiny.head_dim + 1}."
    yield (
        tiny.experts_per_token > tiny.experts,
        f"model.tiny.experts_per_token = {tiny.experts_per_token} is more than model.tiny.experts = {tiny.experts}. "
        f"Type model.tiny.experts_per_token = {tiny.experts} or less.",
    )
    yield (
        config.model.path == "tiny" and rollout.max_tokens > tiny.max_tokens,
        f"rollout.max_tokens = {rollout.max_tokens} is more than the model accepts, model.tiny.max_tokens = "
        f"{tiny.max_tokens}. Type rollout.max_tokens = {tiny.max_tokens} or less, or model.tiny.max_tokens = "
        f"{rollout.max_tokens}.",
    )
    yield (
        config.model.path == "tiny" and config.model.lora.rank > 0,
        f"model.lora.rank = {config.model.lora.rank} adapts weights that are learned already, and a tiny model has "
        "none. Type model.path = FOLDER or model.lora.rank = 0.",
    )
    yield (
        rollout.max_turn_tokens >= rollout.max_tokens,
        f"rollout.max_turn_tokens = {rollout.max_turn_tokens} leaves no room in rollout.max_tokens = "
        f"{rollout.max_tokens}. Type a smaller rollout.max_turn_tokens.",
    )
    yield (
        learner.mini_batches > rollout.groups,
        f"learner.mini_batches = {learner.mini_batches} cannot cut rollout.groups = {rollout.groups} by whole groups. "
        f"Type learner.mini_batches = {rollout.groups} or less.",
    )
    yield (
        config.run.processes > 1 and config.env.deadline_seconds > 0,
        f"run.processes = {config.run.processes} forks a process that has workers of its own, for "
        f"env.deadline_seconds = {config.env.deadline_seconds:g}. Type run.processes = 1 or no deadline.",
    )
    for key, seconds in (
        ("env.deadline_seconds", config.env.deadline_seconds),
        ("method.reward_seconds", config.method.reward_seconds),
    ):
        yield (
            seconds > 0 and config.run.deterministic,
            f"{key} = {seconds:g} depends on the speed of the machine, and run.deterministic = true forbids that. Type "
            f"run.deterministic = false or {key} = 0.",
        )
    yield (
        config.env.memory_gigabytes > 0 and config.env.deadline_seconds == 0,
        f"env.memory_gigabytes = {config.env.memory_gigabytes:g} limits processes that only a deadline starts. Type "
        "env.deadline_seconds = 60 and run.deterministic = false, or env.memory_gigabytes = 0.",
    )
    yield from _domain_contradictions(config.env)
    yield from _user_contradictions(config.env)
    yield from _split_contradictions(config)


def _domain_contradictions(env: EnvConfig) -> Iterator[tuple[bool, str]]:
    own = is_own(env.domain)
    near = difflib.get_close_matches(env.domain, SPLITS, n=1) or ["telecom"]
    known = ", ".join(SPLITS)
    yield (
        env.domain not in SPLITS and not own,
        f'env.domain = "{env.domain}": there is no such domain. Type "{near[0]}" or "package.module:callable". '
        f"Domains: {known}.",
    )
    for key in ("solo", "user", "max_turns"):
        yield (
            own and getattr(env, key) != EnvConfig.model_fields[key].default,
            f"env.{key} does nothing with an environment of your own. Leave it out, and set it in {env.domain}.",
        )


def _split_contradictions(config: Config) -> Iterator[tuple[bool, str]]:
    domain, roles = config.env.domain, SPLITS.get(config.env.domain, OWN_SPLITS)
    for key, chosen, allowed in (
        ("tasks.split", [config.tasks.split], [split for split, role in roles.items() if role == "train"]),
        ("validation.split or validation.extra", [config.validation.split, *config.validation.extra], list(roles)),
    ):
        for split in dict.fromkeys(chosen):
            why = f"it is {roles[split]}, no run trains on it" if split in roles else f"{domain} has no such split"
            known = " or ".join(f'"{name}"' for name in allowed)
            yield split not in allowed, f'{key} = "{split}": {why}. Type {known}.'


def _user_contradictions(env: EnvConfig) -> Iterator[tuple[bool, str]]:
    yield (
        env.user not in USERS and not is_own(env.user),
        f'env.user = "{env.user}": there is no such user. Type "scripted", "endpoint", "replay" or '
        '"package.module:callable".',
    )
    yield env.solo and env.user != "scripted", f'env.solo = true has no user. Leave out env.user = "{env.user}".'
    missing = [f"env.endpoint.{key}" for key in ("base_url", "model") if not getattr(env.endpoint, key)]
    yield (
        env.user == "endpoint" and bool(missing),
        f'env.user = "endpoint" needs {" and ".join(missing)}. Type, for instance, '
        "--set env.endpoint.base_url=http://localhost:8000/v1 --set env.endpoint.model=NAME",
    )
    yield (
        env.user == "replay" and not env.replay,
        'env.user = "replay" needs a recording. Type --set env.replay=runs/NAME/trajectories/FILE.jsonl.zst',
    )
