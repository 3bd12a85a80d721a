"""The package's own evaluator as an oracle. Only tests import it: it needs pandas, and litellm by name."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
from tau2.domains.telecom.user_data_model import VpnDetails
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.environment.environment import Environment

from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2.env import Tau2Env

STEPS = itertools.count()


class _Anything(types.ModuleType):
    """A module that has every name; the evaluator imports litellm but calls it only for judged tasks."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@cache
def _plain_database(domain: str) -> tuple[type, str]:
    database = importlib.import_module(f"tau2.domains.{domain}.data_model").get_db()
    return type(database), database.model_dump_json()


def plain_world(domain: str, solo_mode: bool = False) -> Environment:
    """The package's own environment on a database of its own."""
    # A fault of an earlier task may have changed this class attribute for good.
    TelecomUserTools.default_vpn_details = VpnDetails(
        server_address="192.168.1.1", protocol="OpenVPN", server_performance="excellent"
    )
    solo = {"solo_mode": True} if solo_mode else {}
    get_environment = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment
    database_class, text = _plain_database(domain)
    return get_environment(db=database_class.model_validate_json(text), **solo)


def _messages(env: Tau2Env) -> list[Any]:
    messages = []
    for actor, message in env.episode.record:
        time = f"{next(STEPS):012d}"
        if message.role == "tool":
            messages.append(
                ToolMessage(
                    id=message.tool_call_id,
                    role="tool",
                    content=message.content,
                    requestor=actor,
                    error=message.error,
                    timestamp=time,
                )
            )
            continue
        calls = [
            ToolCall(id=call.id, name=call.name, arguments=dict(call.arguments), requestor=actor)
            for call in message.tool_calls
        ]
        kind = AssistantMessage if actor == "assistant" else UserMessage
        messages.append(
            kind(role=actor, content=None if calls else message.content, tool_calls=calls or None, timestamp=time)
        )
    return messages


@pytest.fixture(scope="session")
def package_reward() -> Iterator[Callable[[Tau2Env], tuple[float, dict[str, float]]]]:
    """Returns a function: the package's reward and parts of an episode that has ended."""
    names = ["litellm", "litellm.caching", "litellm.caching.caching", "litellm.main"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, _Anything(name))
        evaluator = importlib.import_module("tau2.evaluator.evaluator")
        simulation = importlib.import_module("tau2.data_model.simulation")
    patch = pytest.MonkeyPatch()

    def reward(env: Tau2Env) -> tuple[float, dict[str, float]]:
        patch.setattr(
            evaluator.registry,
            "get_env_constructor",
            lambda domain: lambda solo_mode=False: plain_world(domain, solo_mode),
        )
        by_agent = env.episode.stop_reason is StopReason.AGENT_STOP
        run = simulation.SimulationRun(
            id="run",
            task_id=env.episode.task.id,
            start_time="0",
            end_time="1",
            duration=1.0,
            termination_reason="agent_stop" if by_agent else "user_stop",
            messages=_messages(env),
        )
        result = evaluator.evaluate_simulation(
            simulation=run,
            task=env.episode.task,
            evaluation_type=evaluator.EvaluationType.ALL,
            solo_mode=env.solo and env.domain in ("telecom", "mock"),
            domain=env.domain,
        )
        return result.reward, {part.value: value for part, value in (result.reward_breakdown or {}).items()}

    yield reward
    patch.undo()


@pytest.fixture(scope="session")
def new_plain_world() -> Callable[..., Environment]:
    """Returns a function: a new environment of the package itself."""
    return plain_world
