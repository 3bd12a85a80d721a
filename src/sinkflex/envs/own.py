"""Environments outside this package that a recipe names: `env.domain = "package.module:callable"`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol


class OwnTask(Protocol):
    """A task of an environment of one's own."""

    @property
    def task_id(self) -> str: ...
    @property
    def tags(self) -> Any: ...


class OwnEnvironment(Protocol):
    """What a recipe's environment has beyond the contract in `envs/env.py`.

    Attributes:
        policy: the system text.
        tools: tool schemas in OpenAI form.
        solo: False; True only if the agent ends an episode with a call of `done`.
    """

    policy: str
    tools: Sequence[dict[str, Any]]
    solo: bool

    def tasks(self, split: str) -> Sequence[OwnTask]:
        """Return the tasks of "train" or "test"."""
        ...


def is_own(path: str) -> bool:
    """True for a path to a callable, of a domain or a user, rather than a name."""
    module, _, name = path.partition(":")
    return bool(module and name)


def own_environment(domain: str) -> Any:
    """Import and call what the recipe names; it returns a new environment.

    Raises:
        ValueError: it cannot be imported, or lacks what a recipe needs.
    """
    module, _, name = domain.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"env.domain = {domain!r} cannot be imported ({error}); expected package.module:callable, with its folder "
            "on PYTHONPATH"
        ) from error
    env = make()
    if missing := [
        attribute for attribute in ("policy", "tools", "solo", "tasks", "reset", "step") if not hasattr(env, attribute)
    ]:
        raise ValueError(
            f"env.domain = {domain!r} makes a {type(env).__name__} without {', '.join(missing)}; see envs/own.py for "
            "what a recipe's environment has"
        )
    return env
