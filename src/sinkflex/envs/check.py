"""The conformance check that every environment here passes: Gymnasium's own, and what training needs beyond it."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence

from sinkflex.envs.env import Action, Message, StopReason

ABORTED_EPISODES = 20
MAX_TURNS = 1000


def check_environment(make: Callable[[], gymnasium.Env], seed: int = 0) -> None:
    """Raise AssertionError with the broken rule, or return.

    The rules: Gymnasium's `check_env` without a warning; spaces that sample what they contain, compare and pickle;
    results of `step` that agree with each other; equal seeds and actions give equal episodes; a fork and its origin do
    not touch each other; a pickled episode goes on where it was; an unusable action costs a turn and reaches nobody;
    stepping outside an episode raises; an episode ends in the end; aborted episodes leave no thread behind.

    Args:
        make: returns a new environment; called several times.
        seed: seed of resets and of the actions tried, which are drawn from the action space.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(), skip_render_check=True)
    _check_spaces(make(), seed)
    _check_episode(make(), seed)
    _check_determinism(make, seed)
    _check_fork(make(), seed)
    _check_unusable_actions(make(), seed)
    _check_outside_an_episode(make())
    _check_threads(make, seed)


def _check_spaces(env: gymnasium.Env, seed: int) -> None:
    for space in (env.action_space, env.observation_space):
        space.seed(seed)
        samples = [space.sample() for _ in range(20)]
        assert all(sample in space for sample in samples), f"{space} samples what it does not contain"
        assert pickle.loads(pickle.dumps(space)) == space, f"{space} does not survive a pickle"
        assert object() not in space, f"{space} contains anything"


def _check_episode(env: gymnasium.Env, seed: int) -> None:
    observation, info = env.reset(seed=seed)
    assert observation, "reset() shows the agent nothing"
    assert info["stop_reason"] is None, "an episode starts with a stop reason"
    env.action_space.seed(seed)
    for _ in range(MAX_TURNS):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        assert all(isinstance(item, Message) for item in observation), f"not a tuple of messages: {observation}"
        assert isinstance(reward, float), f"a reward is a float, found {type(reward).__name__}"
        assert not (terminated and truncated), "an episode both terminated and truncated"
        reason = info["stop_reason"]
        assert (reason is None) == (not (terminated or truncated)), f"stop reason {reason} in disagreement with flags"
        if action.tool_calls and not action.error:
            answered = [item.tool_call_id for item in observation if item.role == "tool"]
            assert answered == [call.id for call in action.tool_calls], f"calls {action.tool_calls} got {answered}"
        if reason is not None:
            assert StopReason(reason).terminated == terminated, f"{reason} is in disagreement with terminated"
            assert terminated or reward == 0.0, f"a truncated episode paid {reward}"
            assert isinstance(info["reward_parts"], dict), "no reward parts at the end"
            return
    raise AssertionError(f"no end after {MAX_TURNS} turns: the environment has no turn limit")


def _play(env: gymnasium.Env, actions: list[Action]) -> list[Any]:
    """Results of up to all of the actions, until the episode ends."""
    results = []
    for action in actions:
        results.append(env.step(action))
        if results[-1][2] or results[-1][3]:
            break
    return results


def _samples(env: gymnasium.Env, seed: int, count: int) -> list[Action]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


def _check_determinism(make: Callable[[], gymnasium.Env], seed: int) -> None:
    first, second = make(), make()
    assert data_equivalence(first.reset(seed=seed), second.reset(seed=seed), exact=True), "equal seeds, unequal starts"
    actions = _samples(first, seed, 8)
    assert data_equivalence(_play(first, actions), _play(second, actions), exact=True), "equal seeds, unequal episodes"
    assert data_equivalence(first.reset(), second.reset(), exact=True), "equal seeds, unequal second episodes"


def _check_fork(env: Any, seed: int) -> None:
    env.reset(seed=seed)
    if any(env.step(Action(text="Hello, what can I do for you?"))[2:4]):
        env.reset(seed=seed)
    ours, theirs = _samples(env, seed, 6), _samples(env, seed + 1, 6)
    fork, other, deep, stored = env.fork(), env.fork(), copy.deepcopy(env), pickle.dumps(env)
    expected = _play(env, ours)
    _play(other, theirs)
    for name, copied in (("fork", fork), ("deepcopy", deep), ("pickle", pickle.loads(stored))):
        assert data_equivalence(_play(copied, ours), expected, exact=True), f"a {name} does not go on as its origin"


def _check_unusable_actions(env: gymnasium.Env, seed: int) -> None:
    for action in (Action(error="unfinished call"), Action(), Action(text=" \n"), Action(text="<think>hm")):
        env.reset(seed=seed)
        observation, reward, _, _, info = env.step(action)
        assert observation and all(item.role == "tool" and item.error for item in observation), (
            f"{action} came back as {observation}, expected an error"
        )
        assert reward == 0.0 and info["turns"] == 1, f"{action} did not cost exactly a turn"


def _check_outside_an_episode(env: gymnasium.Env) -> None:
    def refuses(when: str) -> None:
        try:
            env.step(Action(text="hello"))
        except ResetNeeded:
            return
        raise AssertionError(f"step() {when} did not raise ResetNeeded")

    refuses("before reset()")
    env.reset(seed=0)
    for _ in range(MAX_TURNS):
        if any(env.step(Action(error="unfinished call"))[2:4]):
            break
    refuses("after the end")
    env.reset(seed=0)
    env.close()
    env.close()
    refuses("after close()")


def _check_threads(make: Callable[[], gymnasium.Env], seed: int) -> None:
    before = threading.active_count()
    env = make()
    for i in range(ABORTED_EPISODES):
        env.reset(seed=seed + i)
        env.step(Action(text="hello"))
    env.close()
    after = threading.active_count()
    assert after <= before, f"{ABORTED_EPISODES} aborted episodes left {after - before} threads"
