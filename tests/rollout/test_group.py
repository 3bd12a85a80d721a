"""Groups of episodes: who shares a seed, and what a fault before the first turn leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sinkflex.envs.env import Action, EnvironmentFault, Message, StopReason, UserFault
from sinkflex.learner.rows import rows_of
from sinkflex.methods.grpo import GRPO
from sinkflex.metrics import describe
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.rollout.group import Phase, rollout
from sinkflex.scores import summarize
from sinkflex.train import mini_batches, rollout_metrics
from sinkflex.trajectory import Group, Outcome, write_trajectories
from tests.policy.tiny_policy import TOOLS, tiny_policy


class OneTurn:
    """Ends after one turn, or breaks when a task of the name "broken" starts."""

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        if options["task_id"] == "broken":
            raise EnvironmentFault("the server is down")
        return (Message("user", "Hi."),), {}

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        return (), 1.0, True, False, {"stop_reason": StopReason.USER_STOP, "reward_parts": {}}

    def close(self) -> None:
        pass


class Flaky(OneTurn):
    """Breaks in the middle of the first two episodes of every task "flaky", all over its instances."""

    broken = 0

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self.task_id = options["task_id"]
        return super().reset(seed, options)

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        if self.task_id == "flaky" and Flaky.broken < 2:
            Flaky.broken += 1
            raise UserFault("the user's server died")
        return super().step(action)


def groups_of(task_ids: list[str], size: int, trials: bool = False, step: int = 0) -> list[Group]:
    policy = tiny_policy()
    sampler = Sampler(policy.model, [1], slots=3, max_tokens=400, max_turn_tokens=2)
    phase = Phase("train", 0, step, 0, temperature=1.0, trials=trials)
    return rollout(task_ids, size, OneTurn, Chat(policy.tokenizer, "", TOOLS), sampler, phase)[0]


def test_siblings_meet_one_environment_and_trials_each_their_own() -> None:
    siblings, trials = (groups_of(["a", "b", "a"], 4, trials) for trials in (False, True))
    seeds = [[t.seed for t in group.members] for group in siblings]
    assert [len(set(group)) for group in seeds] == [1, 1, 1] and len({group[0] for group in seeds}) == 3
    assert len({t.seed for group in trials for t in group.members}) == 12
    assert [group.members[0].seed for group in trials] == [group[0] for group in seeds], "one trial is the plain score"


def test_a_validation_has_the_users_of_the_one_before_and_a_training_step_has_others() -> None:
    def seeds(trials: bool, step: int) -> list[int]:
        return [t.seed for group in groups_of(["a", "b"], 2, trials, step) for t in group.members]

    assert seeds(True, 0) == seeds(True, 5)
    assert not set(seeds(False, 0)) & set(seeds(False, 5))


@pytest.mark.parametrize("task_ids", [["broken"] * 3, ["broken", "a"]])
def test_an_episode_that_breaks_before_its_first_turn_is_listed_and_counts_nowhere(
    task_ids: list[str], tmp_path: Path
) -> None:
    groups = groups_of(task_ids, 2)
    broken = groups[0].members
    assert [(t.turns, t.outcome, t.reward, t.fault) for t in broken] == [
        ([], Outcome.INVALID, None, "the server is down")
    ] * 2
    rows = rows_of(groups, [GRPO({}, 64).advantages(group) for group in groups])
    assert {row.group_index for row in rows} == {i for i, task_id in enumerate(task_ids) if task_id != "broken"}
    assert [len(part) for part in mini_batches(rows, 2)] == ([2] if rows else [])
    assert rollout_metrics(groups)["rollout/invalid"] == 2 * task_ids.count("broken")
    assert summarize(groups)["mean@1"] == (1.0 if rows else None)
    write_trajectories(tmp_path / "t.jsonl.zst", groups)
    lines = zstandard.ZstdDecompressor().decompress((tmp_path / "t.jsonl.zst").read_bytes()).decode().splitlines()
    assert [json.loads(line)["reward"] for line in lines[:2]] == [None, None]


def flaky_groups(retries: int) -> tuple[list[Group], dict[str, float]]:
    Flaky.broken = 0
    policy = tiny_policy()
    sampler = Sampler(policy.model, [1], slots=3, max_tokens=400, max_turn_tokens=2)
    chat, phase = Chat(policy.tokenizer, "", TOOLS), Phase("train", 0, 0, 0, temperature=1.0)
    return rollout(["flaky", "a"], 3, Flaky, chat, sampler, phase, retries=retries)


def test_a_retried_episode_is_the_one_that_the_fault_has_cut() -> None:
    (broken, _), (retried, facts) = flaky_groups(0), flaky_groups(1)
    assert [t.valid for t in broken[0].members] == [False, False, True]
    assert facts["retried"] == 2 and all(t.valid for t in retried[0].members)
    Flaky.broken = 2
    policy = tiny_policy()
    clean, _ = rollout(
        ["flaky", "a"],
        3,
        Flaky,
        Chat(policy.tokenizer, "", TOOLS),
        Sampler(policy.model, [1], slots=3, max_tokens=400, max_turn_tokens=2),
        Phase("train", 0, 0, 0, temperature=1.0),
    )
    for ours, theirs in zip(retried, clean, strict=True):
        for one, other in zip(ours.members, theirs.members, strict=True):
            assert (one.member, one.seed, one.reward) == (other.member, other.seed, other.reward)
            assert [turn.action_ids for turn in one.turns] == [turn.action_ids for turn in other.turns]


def test_faults_are_counted_by_kind_and_a_lone_sibling_teaches_nothing() -> None:
    groups, _ = flaky_groups(0)
    values = rollout_metrics(groups)
    assert values["rollout/invalid"] == values["rollout/invalid/user_fault"] == 2
    assert values["rollout/lone_groups"] == 1
    for name in values:
        describe(name)
    assert [a.any() for a in GRPO({}, 64).advantages(groups[0])] == [False]
