"""From the `[env]` section of a recipe to the user that its episodes talk to."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sinkflex.config import EndpointConfig, EnvConfig
from sinkflex.users.chat_server import ChatServer
from sinkflex.users.endpoint import EndpointUser
from sinkflex.users.replay import RecordedUser
from sinkflex.users.user import User

_METHODS = ("reset", "reply", "observe", "fork")


def configured_user(env: EnvConfig) -> str | User | Callable[[], User]:
    """Return what an environment takes as its user: a name, a prototype that episodes fork, or a callable.

    Raises:
        ValueError: the server, the recording or the callable that the recipe names cannot be used.
    """
    if env.user == "endpoint":
        return EndpointUser(server_of(env.endpoint), {"temperature": env.endpoint.temperature})
    if env.user == "replay":
        return RecordedUser(Path(env.replay), env.domain)
    return env.user if env.user == "scripted" else _own_user(env.user)


def server_of(endpoint: EndpointConfig, section: str = "env.endpoint") -> ChatServer:
    """Return the client of the server that a section of the recipe names.

    Raises:
        ValueError: the environment variable of its key is not set, or the address is none.
    """
    variable = endpoint.api_key_variable
    if variable and not os.environ.get(variable):
        raise ValueError(
            f"{section}.api_key_variable: the environment variable {variable} is not set. Type export {variable}=KEY"
        )
    return ChatServer(
        endpoint.base_url,
        endpoint.model,
        api_key=os.environ.get(variable, "") if variable else "",
        timeout_seconds=endpoint.timeout_seconds,
        attempts=1 + endpoint.retries,
    )


def _own_user(path: str) -> User | Callable[[], User]:
    """Import a user of one's own: a class or another callable that returns a user, or a prototype."""
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"env.user = {path!r} cannot be imported ({error}); expected package.module:callable, importable from here"
        ) from error
    try:
        user = found() if callable(found) else found
    except TypeError as error:
        raise ValueError(f"env.user = {path!r}: {error}; expected a callable without arguments") from error
    missing = [method for method in _METHODS if not callable(getattr(user, method, None))]
    missing += [] if isinstance(inspect.getattr_static(user, "kind", None), str) else ["kind (a text)"]
    if missing:
        raise ValueError(
            f"env.user = {path!r} gives a {type(user).__name__} without {', '.join(missing)}; "
            "expected a user as in sinkflex.users.user.User"
        )
    return cast("User | Callable[[], User]", found)
