"""What a scorer says equals what the model says row by row, and falls into the places of the rows it was given."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sinkflex.envs.env import Action, Message, StopReason
from sinkflex.learner.rows import rows_of
from sinkflex.learner.scorer import Scorer, insert, require_vocabulary
from sinkflex.policy.chat import Chat
from sinkflex.policy.sampler import Sampler
from sinkflex.trajectory import Group, Outcome, Row, Trajectory, Turn
from tests.policy.tiny_policy import TOOLS, tiny_policy

POLICY, OTHER = tiny_policy(), tiny_policy(1)


def scorer(budget: int = 40, temperature: float = 1.0) -> Scorer:
    def refuse(folder: Path) -> torch.nn.Module:
        raise ValueError(f"{folder}: no such model")

    sampler = Sampler(POLICY.model, [1], slots=2, max_tokens=400, max_turn_tokens=5)
    chat = Chat(POLICY.tokenizer, "", TOOLS)
    named = {"policy": lambda: POLICY.model, "reference": lambda: OTHER.model}
    return Scorer(named, refuse, chat, sampler, temperature, budget)  # type: ignore[arg-type]


def rows() -> list[Row]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(7, POLICY.model.config.vocab_size, 9).tolist()
    members = []
    for i in range(5):
        turns = [
            Turn(p, rng.integers(7, POLICY.model.config.vocab_size, n).tolist(), [0.0] * n, 0, Action(text="x"))
            for p, n in ((prompt, 2 + i), (rng.integers(7, POLICY.model.config.vocab_size, 3).tolist(), 3))
        ]
        members.append(Trajectory("t", i, turns, Outcome.FAILED, StopReason.USER_STOP, 0.0))
    group = Group("t", members)
    return rows_of([group], [[np.zeros(t.sampled_tokens, np.float32) for t in group.valid]])


def whole(model: torch.nn.Module, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs [T, V] of what follows each place of one sequence, alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.float() / temperature, -1).numpy()


@pytest.mark.parametrize("model", ["policy", "reference"])
def test_logprobs_of_packed_rows_are_those_of_each_row_alone(model: str) -> None:
    at_hand = {"policy": POLICY.model, "reference": OTHER.model}[model]
    for row, found in zip(rows(), scorer(temperature=0.7).logprobs(rows(), model), strict=True):
        alone = whole(at_hand, row.token_ids, 0.7)
        wanted = [alone[t - 1, row.token_ids[t]] if row.loss_mask[t] else 0.0 for t in range(len(row))]
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_likeliest_ids_and_their_logprobs_under_another_model() -> None:
    batch, s = rows(), scorer()
    best = s.top_k(batch, k=4)
    for row, (ids, logprobs) in zip(batch, best, strict=True):
        assert ids.shape == logprobs.shape == (len(row), 4)
        alone = whole(POLICY.model, row.token_ids)
        for t in np.flatnonzero(row.loss_mask):
            order = np.argsort(-alone[t - 1])[:4]
            assert ids[t].tolist() == order.tolist()
            np.testing.assert_allclose(logprobs[t], alone[t - 1][order], atol=2e-5)
        row.streams["best"] = ids
    for row, found in zip(batch, s.logprobs(batch, "reference", candidates="best"), strict=True):
        other = whole(OTHER.model, row.token_ids)
        for t in np.flatnonzero(row.loss_mask):
            np.testing.assert_allclose(found[t], other[t - 1][row.streams["best"][t]], atol=2e-5)


def test_an_edited_prompt_keeps_the_places_of_the_row_that_was_given() -> None:
    batch, lesson = rows(), [11, 12, 13]
    found = scorer().logprobs(batch, edit=lambda row: insert(row, 4, lesson))
    for row, values in zip(batch, found, strict=True):
        ids = np.concatenate([row.token_ids[:4], lesson, row.token_ids[4:]])
        alone = whole(POLICY.model, ids)
        wanted = [alone[t + 2, row.token_ids[t]] if row.loss_mask[t] else 0.0 for t in range(len(row))]
        np.testing.assert_allclose(values, wanted, atol=2e-5)
    plain = scorer().logprobs(batch)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(plain, found, strict=True)), "the lesson changes something"


def test_an_edit_may_not_touch_what_was_sampled() -> None:
    with pytest.raises(AssertionError, match="edited"):
        scorer().logprobs(rows(), edit=_without_last)


def _without_last(row: Row) -> Row:
    mask = row.loss_mask.copy()
    mask[-1] = False
    return replace(row, loss_mask=mask)


def test_the_policy_writes_texts_for_more_conversations_than_it_has_slots() -> None:
    asked = [(Message("user", f"Question {i}."),) for i in range(5)]
    s = scorer()
    texts = s.generate(asked, (0, "texts", 1))
    assert len(texts) == 5 and texts == s.generate(asked, (0, "texts", 1))
    assert texts[3] == s.generate(asked[3:4], (0, "texts", 1))[0], "greedy texts do not depend on the company"
    longer = s.generate(asked[:1], (0, "texts", 1), max_tokens=9)[0]
    assert longer.startswith(texts[0]) and s._sampler.max_turn_tokens == 5


def test_a_folder_is_loaded_when_it_is_first_asked_for() -> None:
    with pytest.raises(ValueError, match="no such model"):
        scorer().logprobs(rows(), "teacher")


def test_on_a_gpu_a_model_of_a_folder_comes_for_its_pass_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[str] = []
    s, other = scorer(), tiny_policy(2).model
    monkeypatch.setattr(s, "_load", lambda folder: other)
    monkeypatch.setattr(other, "to", lambda device: moves.append(torch.device(device).type))
    s.logprobs(rows(), "folder")
    assert moves == [], "on a CPU everything stays"
    s._models["policy"] = SimpleNamespace(device=torch.device("cuda"), parameters=POLICY.model.parameters)  # type: ignore[assignment]
    alone = s.logprobs(rows(), "folder")
    s.top_k(rows(), "folder")
    assert moves == ["cuda", "cpu", "cuda", "cpu"]
    with pytest.raises(MemoryError), s._at_work("folder"):
        raise MemoryError
    assert moves == ["cuda", "cpu"] * 3, "after a failure too"
    moves[4:] = []
    s._models["twin"] = POLICY.model
    s.logprobs(rows(), "twin")
    assert POLICY.model.device.type == "cpu", "what has the policy's own weights stays where those are"
    assert s.model("folder") is other and moves.pop() == "cuda"
    assert all(np.array_equal(a, b) for a, b in zip(alone, s.logprobs(rows(), "folder"), strict=True))
    assert moves == ["cuda", "cpu", "cuda", "cpu"], "what was handed out stays"


@pytest.mark.gpu
def test_between_passes_a_model_takes_no_memory_of_the_gpu() -> None:
    policy, other = deepcopy(tiny_policy()), tiny_policy(1)
    policy.model.to("cuda")  # type: ignore[arg-type]
    s = scorer()
    s._named |= {"policy": lambda: policy.model, "reference": lambda: other.model}
    found = s.logprobs(rows(), "reference")
    assert other.model.device.type == "cpu" and policy.model.device.type == "cuda"
    for a, b in zip(found, scorer().logprobs(rows(), "reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_a_vocabulary_that_differs_is_refused_with_the_first_id_and_its_tokens() -> None:
    class Words(SimpleNamespace):
        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    mine = Words(vocabulary={"a": 0, "b": 1, "c": 2})
    require_vocabulary(mine, Words(vocabulary={"c": 2, "b": 1, "a": 0}), Path("same"))  # type: ignore[arg-type]
    for theirs, found in (
        ({"a": 0, "c": 1, "b": 2}, "id 1 is 'c' there and 'b' in the policy"),
        ({"a": 0, "b": 1}, "id 2 is 'nothing' there and 'c' in the policy"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "id 3 is 'd' there and 'nothing' in the policy"),
    ):
        with pytest.raises(ValueError, match=f"weak: its vocabulary is not the policy's: {found}"):
            require_vocabulary(mine, Words(vocabulary=theirs), Path("weak"))  # type: ignore[arg-type]
