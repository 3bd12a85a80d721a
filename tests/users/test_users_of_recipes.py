"""`env.user` in recipes: scripted, a server, a recording, one's own; and what a mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import calls, says, serving

from sinkflex.build import make_env
from sinkflex.config import Config
from sinkflex.envs.env import Action, EnvironmentFault
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.policy.sweep import SweepAgent
from sinkflex.recipe import dump_config, load_config
from sinkflex.rollout.scripted import play
from sinkflex.tasks.suites import scored_tasks
from sinkflex.trajectory import Group, Outcome, Trajectory, read_trajectories, write_trajectories
from sinkflex.users.endpoint import EndpointUser
from sinkflex.users.replay import RecordedUser
from sinkflex.users.telecom import TelecomUser
from sinkflex.users.user import UserAction

TASKS = [task.task_id for task in scored_tasks("telecom", "test")[:4]]


class Grumpy:
    """A user of one's own that says one thing."""

    kind = "grumpy"

    def reset(self, task: Any, seed: int) -> UserAction:
        return UserAction("What now?")

    def reply(self, text: str) -> UserAction:
        return UserAction("No.")

    def observe(self, results: Any) -> UserAction:
        return UserAction("Hm.")

    def fork(self) -> Grumpy:
        return Grumpy()


class Mute:
    """No user at all."""

    kind = 7


PROTOTYPE, NEEDS_AN_ARGUMENT = Grumpy(), EndpointUser


def config_of(*options: str) -> Config:
    return load_config("recipes/smoke.toml", options)


def recorded(task_id: str, member: int, seed: int) -> Trajectory:
    """Return the trajectory of one episode of the telecom expert, as a rollout would leave it."""
    dialogue = play(Tau2Env("telecom", "test", max_turns=60), SweepAgent(seed), task_id, seed)
    info = dialogue.info
    outcome = Outcome(info["outcome"])
    return Trajectory(
        task_id,
        member,
        [],
        outcome,
        info["stop_reason"],
        dialogue.reward,
        info["reward_parts"],
        info["user"],
        seed,
        None,
        info["tags"],
        info["domain"],
        list(info["record"]),
    )


def test_a_recipe_talks_to_a_server_and_gets_its_key_from_the_environment(monkeypatch: Any) -> None:
    script = (says("My data is slow."), calls(("run_speed_test", "{}")), says("It is poor."))
    with serving(*script) as server:
        options = [
            f"env.endpoint.base_url={server.url}",
            "env.endpoint.model=m",
            "env.endpoint.api_key_variable=MY_KEY",
        ]
        config = config_of("env.user=endpoint", *options, "env.endpoint.temperature=0.5")
        monkeypatch.delenv("MY_KEY", raising=False)
        with pytest.raises(ValueError, match="Type export MY_KEY=KEY"):
            make_env(config)
        monkeypatch.setenv("MY_KEY", "secret")
        env = make_env(config)
        _, info = env.reset(seed=0, options={"task_id": TASKS[0]})
        assert env.step(Action(text="Please run a speed test."))[0][0].content == "It is poor."
    assert info["user"] == "endpoint"
    _, headers, body = server.requests[0]
    assert (headers["Authorization"], body["model"], body["temperature"]) == ("Bearer secret", "m", 0.5)
    assert "secret" not in dump_config(config)


def test_the_options_of_the_server_reach_it() -> None:
    options = ("base_url=http://localhost:1/v1", "model=m", "timeout_seconds=2.5", "retries=0")
    user = make_env(config_of("env.user=endpoint", *(f"env.endpoint.{option}" for option in options))).user
    assert isinstance(user, EndpointUser)
    assert (user.server.timeout_seconds, user.server.attempts, user.server.api_key) == (2.5, 1, "")


def test_a_dead_server_is_a_fault_that_says_what_to_type_and_keeps_the_kind() -> None:
    with serving(says("Hello.")) as server:
        pass
    options = (f"env.endpoint.base_url={server.url}", "env.endpoint.model=m", "env.endpoint.retries=0")
    with pytest.raises(EnvironmentFault, match=rf"Type curl {server.url}/models") as fault:
        make_env(config_of("env.user=endpoint", *options)).reset(seed=0, options={"task_id": TASKS[0]})
    assert (fault.value.info["user"], fault.value.info["domain"]) == ("endpoint", "telecom")
    assert fault.value.info["tags"]["family"]


def test_demonstrations_and_floors_are_played_with_the_scripted_user() -> None:
    config = config_of("env.user=endpoint", "env.endpoint.base_url=http://localhost:1/v1", "env.endpoint.model=m")
    assert make_env(config, offline=True).user == "scripted"
    assert make_env(config_of("env.user=tests.users.test_users_of_recipes:Grumpy"), offline=True).user == "scripted"


@pytest.mark.parametrize("name", ["Grumpy", "PROTOTYPE"])
def test_a_user_of_ones_own_is_a_class_or_a_prototype(name: str) -> None:
    env = make_env(config_of(f"env.user=tests.users.test_users_of_recipes:{name}"))
    observation, info = env.reset(seed=0, options={"task_id": TASKS[0]})
    assert info["user"] == "grumpy" and observation[0].content == "What now?"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["env.user=scritped"], 'Type "scripted", "endpoint", "replay" or "package.module:callable".'),
        (["env.user=endpoint"], "needs env.endpoint.base_url and env.endpoint.model. Type"),
        (["env.user=endpoint", "env.endpoint.base_url=http://x/v1"], "needs env.endpoint.model. Type"),
        (["env.user=endpoint", "env.endpoint.url=x"], "env.endpoint.url is not an option. "),
        (["env.user=replay"], "Type --set env.replay="),
        (["env.user=replay", "env.replay=no.jsonl.zst"], "no.jsonl.zst: no such file"),
        (["env.user=replay", "env.replay=x", "env.solo=true"], "env.solo = true has no user"),
        (["env.user=endpoint", "env.endpoint.base_url=localhost", "env.endpoint.model=m"], "http://localhost:8000/v1"),
        (["env.user=no.such.module:User"], "cannot be imported (No module named 'no')"),
        (["env.user=tests.users.test_users_of_recipes:Missing"], "cannot be imported"),
        (["env.user=tests.users.test_users_of_recipes:NEEDS_AN_ARGUMENT"], "expected a callable without arguments"),
        (["env.user=tests.users.test_users_of_recipes:Mute"], "a Mute without reset, reply, observe, fork, kind"),
    ],
)
def test_a_mistake_says_what_to_type(options: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        make_env(config_of(*options))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_recorded_file_is_played_again_in_every_trial(tmp_path: Path) -> None:
    groups = [Group(task_id, [recorded(task_id, k, 10 * i + k) for k in (0, 1)]) for i, task_id in enumerate(TASKS)]
    path = tmp_path / "t.jsonl.zst"
    write_trajectories(path, groups)
    env = make_env(config_of("env.user=replay", f"env.replay={path}", "env.max_turns=60"))
    used = 0
    for group in read_trajectories(path):
        for old in group.members:
            assert old.domain == "telecom" and old.user == "scripted"
            used += sum(actor == "user" and bool(message.tool_calls) for actor, message in old.record)
            dialogue = play(env, SweepAgent(old.seed), old.task_id, old.seed)
            assert list(dialogue.info["record"]) == old.record and dialogue.info["user"] == "replay"
            assert dialogue.info["reward_parts"] == old.reward_parts and dialogue.reward == old.reward
    assert used > 20, "the user's own calls are recorded too"
    dialogue = play(env, SweepAgent(groups[0].members[1].seed), TASKS[0], 10**6)
    assert dialogue.info["stop_reason"] is not None, "another seed plays one of the recordings"


def test_what_is_not_recorded_is_a_fault_and_a_wrong_file_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    write_trajectories(path, [Group(TASKS[0], [recorded(TASKS[0], 0, 1)])])
    user = RecordedUser(path, "telecom")
    with pytest.raises(EnvironmentFault, match="holds no episode of task"):
        Tau2Env("telecom", "test", user=user).reset(seed=0, options={"task_id": TASKS[1]})
    with pytest.raises(ValueError, match=r"no user of retail is recorded there \(1 valid episodes, of telecom"):
        RecordedUser(path, "retail")
    old = read_trajectories(path)
    old[0].members[0].record = []
    write_trajectories(path, old)
    with pytest.raises(ValueError, match="Type sinkflex evaluate RUN --save"):
        RecordedUser(path, "telecom")


def test_a_forked_recorded_user_plays_its_own_part(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    write_trajectories(path, [Group(TASKS[0], [recorded(TASKS[0], 0, 1)])])
    env = Tau2Env("telecom", "test", user=RecordedUser(path, "telecom"))
    env.reset(seed=1, options={"task_id": TASKS[0]})
    twin = env.fork()
    assert env.step(Action(text="Hello?"))[0] == twin.step(Action(text="Hello?"))[0]


def test_a_scripted_recipe_is_as_before() -> None:
    env = make_env(config_of())
    _, info = env.reset(seed=0, options={"task_id": TASKS[0]})
    assert env.user == "scripted" and info["user"] == "scripted" and isinstance(env.episode.user, TelecomUser)
    assert json.dumps(config_of().flat()["env.user"]) == '"scripted"'
