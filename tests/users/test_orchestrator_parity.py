"""The package's own orchestrator and environment with our users: every episode ends there as it does here."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from interviewing import interviewed
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, ToolMessage, UserMessage

from sinkflex.envs.env import Action, Message, StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.database import state_hash
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.episode import make_user
from sinkflex.seeds import seed_for
from sinkflex.users.telecom_phrases import verbalize
from sinkflex.users.user import UserAction

SAMPLE = {"retail": ["5", "76"], "airline": ["23"], "telecom": None}


class Anything(types.ModuleType):
    """A module that has every name: the orchestrator imports litellm and calls it only for models."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("litellm", "litellm.caching", "litellm.caching.caching", "litellm.main"):
            patch.setitem(sys.modules, name, Anything(name))
        yield importlib.import_module("tau2.orchestrator.orchestrator")


def agent_actions(env: Tau2Env) -> list[Message]:
    """What the agent of an ended episode said and called, after its greeting."""
    return [m for actor, m in env.episode.record[1:] if actor == m.role == "assistant"]


def theirs(module: Any, env: Tau2Env, seed: int) -> Any:
    """Run the package's orchestrator with the agent's side of an episode and a user of ours."""
    task, lines = env.episode.task, iter(agent_actions(env))
    user = make_user("scripted", env.domain)

    class Agent(module.BaseAgent):
        def get_init_state(self, message_history: Any = None) -> None:
            return None

        def generate_next_message(self, message: Any, state: None) -> tuple[AssistantMessage, None]:
            line = next(lines)
            made = [ToolCall(id=c.id, name=c.name, arguments=dict(c.arguments)) for c in line.tool_calls]
            text = None if made else line.content
            return AssistantMessage(role="assistant", content=text, tool_calls=made or None), None

        def stop(self, message: Any = None, state: Any = None) -> None:
            pass

    class User(module.BaseUser):
        def get_init_state(self, message_history: Any = None) -> None:
            self.started = False

        def generate_next_message(self, message: Any, state: None) -> tuple[UserMessage, None]:
            if not self.started:
                self.started = True
                return spoken(user.reset(task, seed)), None
            if isinstance(message, (MultiToolMessage, ToolMessage)):
                answers = message.tool_messages if isinstance(message, MultiToolMessage) else [message]
                return spoken(user.observe(tuple(Message("tool", a.content, error=a.error) for a in answers))), None
            return spoken(user.reply(message.content)), None

        @classmethod
        def is_stop(cls, message: UserMessage) -> bool:
            return "###STOP###" in (message.content or "")

    environment = importlib.import_module(f"tau2.domains.{env.domain}.environment").get_environment()
    run = module.Orchestrator(env.domain, Agent(), User(), environment, task, max_steps=500, max_errors=100)
    run.run()
    return run


def spoken(action: UserAction) -> UserMessage:
    """Return a user's action as the package's message, with its stop token."""
    made = [
        ToolCall(id=f"user_{i}", name=call.name, arguments=dict(call.arguments), requestor="user")
        for i, call in enumerate(action.tool_calls)
    ]
    token = f" ###{action.stop.name.replace('_', '-')}###" if action.stop else ""
    return UserMessage(role="user", content=None if made else f"{action.text or ''}{token}", tool_calls=made or None)


def conversation(messages: Any) -> list[tuple[Any, ...]]:
    """Return messages of either kind in one form: one entry for each text, call and answer."""
    flat: list[tuple[Any, ...]] = []
    for message in messages:
        calls = message.tool_calls or () if message.role != "tool" else ()
        flat += [(message.role, call.name, dict(call.arguments)) for call in calls]
        if not calls:
            flat.append((message.role, (message.content or "").split(" ###")[0]))
    return flat


def played(domain: str, task_id: str) -> tuple[Tau2Env, int]:
    """Play an episode here; return it and the seed of its user."""
    if domain != "telecom":
        return interviewed(domain, task_id).env, seed_for(0, "user", task_id)
    env = Tau2Env("telecom", "base")
    env.reset(seed=3, options={"task_id": task_id})
    for gold in tasks.read("telecom", task_id).evaluation_criteria.actions:
        if env.episode.stop_reason is None and gold.requestor == "user":
            env.step(Action(text=verbalize(gold.name, gold.arguments)))
    while env.episode.stop_reason is None:
        env.step(Action(text="Is it working now?"))
    return env, seed_for(3, "user", task_id)


def compare(module: Any, domain: str, task_id: str) -> None:
    env, seed = played(domain, task_id)
    run = theirs(module, env, seed)
    assert conversation(run.trajectory) == conversation(message for _, message in env.episode.record)
    assert run.termination_reason.value == "user_stop" and env.episode.stop_reason is StopReason.USER_STOP
    assert (run.environment.get_db_hash(), run.environment.get_user_db_hash()) == state_hash(env.episode.world)


@pytest.mark.parametrize("domain", SAMPLE)
def test_an_episode_ends_alike(orchestrator: Any, domain: str) -> None:
    for task_id in SAMPLE[domain] or [spec.task_id for spec in tasks.load("telecom", "base")][:2]:
        compare(orchestrator, domain, task_id)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("domain", SAMPLE)
def test_every_episode_ends_alike(orchestrator: Any, domain: str) -> None:
    for spec in tasks.load(domain, "base"):
        compare(orchestrator, domain, spec.task_id)
