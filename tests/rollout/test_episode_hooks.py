"""What a method may do during an episode: ask again, act otherwise, stop, add text; and windows of history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sinkflex.envs.env import Action, Message, StopReason
from sinkflex.learner.rows import rows_of
from sinkflex.methods.hooks import Decision, Propose, RolloutHooks, TaskFacts, TurnState
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.rollout.group import Phase, rollout
from sinkflex.trajectory import Group, Outcome
from tests.policy.tiny_policy import TOOLS, tiny_policy

POLICY = tiny_policy()


class Echo:
    """Answers every turn with what it was told, and ends after five."""

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        self.heard: list[Action] = []
        return (Message("user", "Hi."),), {"domain": "echo", "tags": {"kind": "loud"}}

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]:
        self.heard.append(action)
        ended = len(self.heard) == 5
        info = {"stop_reason": StopReason.USER_STOP if ended else None, "reward_parts": {}}
        return (Message("user", f"{len(self.heard)}: {action.text}"),), float(ended), ended, False, info

    def close(self) -> None:
        pass


def play(hooks: RolloutHooks | None = None, window: int = 0, purpose: str = "train") -> Group:
    sampler = Sampler(POLICY.model, [1], slots=3, max_tokens=500, max_turn_tokens=4)
    chat = Chat(POLICY.tokenizer, "Be brief.", TOOLS, window)
    return rollout(["a"], 2, Echo, chat, sampler, Phase(purpose, 0, 0, 0, 1.0), hooks=hooks)[0][0]


def text_of(ids: list[int]) -> str:
    return str(POLICY.tokenizer.decode(ids))


class Patched(RolloutHooks):
    """Says something else in the second turn, and stops before the fourth is done."""

    async def act(self, propose: Propose, state: TurnState) -> Decision:
        sampled = await propose()
        if len(state.turns) == 1:
            return Decision(sampled, executed=Action(text="Instead."))
        return Decision(sampled, stop_reason=StopReason.TOO_MANY_ERRORS if len(state.turns) == 3 else None)


def test_a_patched_turn_keeps_what_was_sampled_and_goes_on_from_what_was_done() -> None:
    plain, patched = play(), play(Patched())
    for before, t in zip(plain.members, patched.members, strict=True):
        assert [turn.action_ids for turn in t.turns[:2]] == [turn.action_ids for turn in before.turns[:2]]
        assert [turn.executed for turn in t.turns] == [None, Action(text="Instead."), None, None]
        assert t.turns[1].observation == (Message("user", "2: Instead."),)
        assert [turn.forks for turn in t.turns] == [False, False, True, False]
        assert text_of(t.turns[2].prompt_ids).endswith(
            "<|assistant|>Instead.<|end|><|user|>2: Instead.<|end|><|assistant|>"
        )
        assert (t.stop_reason, t.outcome, t.reward) == (StopReason.TOO_MANY_ERRORS, Outcome.TRUNCATED, 0.0)
        assert t.turns[3].observation == (), "a stopped turn is not done"


def test_every_sampled_id_of_a_patched_episode_is_trained_once_and_no_patch_is() -> None:
    group = play(Patched())
    rows = rows_of([group], [[np.ones(t.sampled_tokens, np.float32) for t in group.valid]])
    trained = [int(i) for row in rows for i in row.token_ids[row.loss_mask]]
    assert trained == [i for t in group.valid for turn in t.turns for i in turn.action_ids]
    assert len(rows) == 4, "each of the two episodes forks once"


class Second(RolloutHooks):
    """Takes the second proposal of each turn."""

    async def act(self, propose: Propose, state: TurnState) -> Decision:
        await propose()
        return Decision(await propose())


def test_a_method_may_ask_for_another_proposal_of_the_same_turn() -> None:
    plain, second = play(), play(Second())
    assert plain.members[0].turns[0].action_ids != second.members[0].turns[0].action_ids
    for t in second.members:
        assert [turn.forks for turn in t.turns] == [False] * 5, "asking again leaves no trace in the row"
        whole = [i for turn in t.turns for i in turn.prompt_ids + turn.action_ids]
        assert "Instead" not in text_of(whole) and text_of(whole).count("<|user|>") == 5


class Scaffold(RolloutHooks):
    """Adds a text while training."""

    def prompt(self, task: TaskFacts, phase: str) -> str | None:
        return f"Known: {task.domain} is {task.tags['kind']}." if phase == "train" else None


def test_a_method_s_text_stands_after_the_system_text_and_only_in_its_phase() -> None:
    told, untold = play(Scaffold()), play(Scaffold(), purpose="validation/test")
    assert text_of(told.members[0].turns[0].prompt_ids).startswith("<|system|>Be brief.\n\nKnown: echo is loud.")
    assert "Known" not in text_of(untold.members[0].turns[0].prompt_ids)


@pytest.mark.parametrize("window", [1, 2])
def test_a_window_keeps_the_opening_and_the_last_exchanges(window: int) -> None:
    whole, t = play().members[0], play(window=window).members[0]
    assert [turn.forks for turn in t.turns] == [k > window for k in range(5)]
    for turn in t.turns[window + 1 :]:
        assert text_of(turn.prompt_ids).count("<|user|>") == 1 + window
        assert text_of(turn.prompt_ids).startswith(text_of(t.turns[0].prompt_ids).removesuffix("<|assistant|>"))
    assert not any(turn.forks for turn in whole.turns)
    same = window + 1
    assert [turn.action_ids for turn in t.turns[:same]] == [turn.action_ids for turn in whole.turns[:same]]


def test_a_window_that_is_never_full_changes_nothing() -> None:
    assert play(window=5).members == play().members
