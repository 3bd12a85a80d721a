"""Each public bug of tokens and templates, planted here: the checks of this suite must notice it.

`docs/exactness.md` lists promise, test and report.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.learner import rows
from sinkflex.policy.chat import Chat
from sinkflex.policy.template import Template
from sinkflex.policy.toolcalls import FORMATS, harmony
from sinkflex.policy.toolcalls.reply import Reply, call_id
from sinkflex.rollout import episode
from tests.policy.exactness import faults, play
from tests.policy.template_cases import TOOLS, chat_of, tokenizer_of
from tests.policy.test_templates import DIALOGUE, OPENING, TWO, results, thoughtful, turns_of


def found(chat: Chat, name: str = "", dialogue: Any = DIALOGUE) -> list[str]:
    """Return the faults of an episode; of one that thinks, if a name is given."""
    turns = [(thoughtful(chat, name, ids) if name else ids, f, answer) for ids, f, answer in turns_of(chat, dialogue)]
    return faults(chat, OPENING, play(chat, OPENING, turns), [ids for ids, _, _ in turns])


def test_a_line_break_lost_after_the_end_of_a_turn_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, whole = chat_of("qwen2_5"), Template.tail
    assert not found(chat)
    monkeypatch.setattr(Template, "tail", lambda *a, **k: (whole(*a, **k) or "").lstrip("\n"))
    assert any("other ids than the template" in fault for fault in found(chat))


def test_taking_a_template_that_rewrites_history_for_one_that_appends_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(self: Template, history: Any, reply: Any, finish: str, head: bool = True) -> str:
        before = self.render(history, generation=False)
        return self.render((*history, *reply), generation=True)[len(before) :]

    chat = chat_of("qwen3")
    assert not found(chat, "qwen3")
    monkeypatch.setattr(Template, "tail", cut)
    assert any("other ids than the template" in fault for fault in found(chat, "qwen3"))


def test_an_id_trained_twice_or_with_another_ones_advantage_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, row = chat_of("harmony"), rows._row
    monkeypatch.setattr(rows, "_row", lambda turns, first, *rest: row([*turns, turns[-1]], first, *rest))
    with pytest.raises((AssertionError, ValueError)):
        assert not found(chat)
    monkeypatch.setattr(
        rows, "_row", lambda turns, first, advantages, *rest: row(turns, first, advantages[::-1], *rest)
    )
    assert "an id has another one's advantage" in found(chat)


def test_a_mask_made_of_roles_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, row = chat_of("llama3"), rows._row

    def by_role(*arguments: Any) -> Any:
        made = row(*arguments)
        starts = [k for k in range(3, len(made)) if made.loss_mask[k] and not made.loss_mask[k - 1]]
        for start in starts:
            made.loss_mask[start - 3 : start] = True  # the header of the assistant's turn
        return made

    monkeypatch.setattr(rows, "_row", by_role)
    assert "the trained ids are not the sampled ones, each once" in found(chat)


def test_a_mask_longer_than_the_ids_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, row = chat_of("qwen2_5"), rows._row

    def longer(*arguments: Any) -> Any:
        made = row(*arguments)
        return dataclasses.replace(made, behavior_logprobs=made.behavior_logprobs.repeat(2))

    monkeypatch.setattr(rows, "_row", longer)
    assert "ids, mask, log-probs or advantages differ in length" in found(chat)


def test_ids_made_anew_from_text_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, kept = chat_of("qwen2_5"), episode.Turn
    words = "Please check the line."
    odd = [i for sign in words for i in chat.tokenizer.encode(sign, add_special_tokens=False)] + [chat.stop_ids[0]]
    turns = [(odd, "stop", (Message("user", "Yes."),)), (chat.action_ids(TWO), "stop", ())]

    def again(prompt: list[int], ids: list[int], logprobs: list[float], *rest: Any, **named: Any) -> Any:
        ids = chat.tokenizer.encode(chat.tokenizer.decode(ids), add_special_tokens=False)
        return kept(prompt, ids, logprobs[: len(ids)], *rest, **named)

    for turn, expected in ((kept, False), (again, True)):
        monkeypatch.setattr(episode, "Turn", turn)
        noticed = faults(chat, OPENING, play(chat, OPENING, turns), [ids for ids, _, _ in turns])
        assert ("the trained ids are not the sampled ones, each once" in noticed) is expected


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "harmony"])
def test_arguments_encoded_twice_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkflex.policy.template._mapping", lambda arguments: arguments)
    chat = Chat(tokenizer_of(name), "", TOOLS)
    monkeypatch.setattr(chat.template, "_arguments", lambda arguments: arguments)
    ids = [
        chat.start([*OPENING, Message("assistant", "", (ToolCall("get_line", form, call_id(0)),))])
        for form in ({"line_id": "L1"}, '{"line_id": "L1"}')  # type: ignore[arg-type]
    ]
    assert ids[0] != ids[1]


def test_a_call_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("qwen2_5")
    read = chat.template.read
    monkeypatch.setattr(chat.template, "read", lambda text: dataclasses.replace(read(text), calls=read(text).calls[:1]))
    with pytest.raises(ValueError, match="does not read back"):
        turns_of(chat, DIALOGUE)
    monkeypatch.undo()
    turns = turns_of(chat, DIALOGUE)
    monkeypatch.setattr(chat.template, "read", lambda text: dataclasses.replace(read(text), calls=read(text).calls[:1]))
    noticed = faults(chat, OPENING, play(chat, OPENING, turns), [ids for ids, _, _ in turns])
    assert "turn 1 has other results than calls" in noticed


def test_results_in_another_order_than_the_calls_are_noticed() -> None:
    swapped = [(TWO, results(TWO, "first", "second")[::-1]), *DIALOGUE[2:]]
    assert "turn 0 has other results than calls" in found(chat_of("mistral"), dialogue=swapped)


def test_a_result_that_is_shortened_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, exchange = chat_of("qwen2_5"), Template._exchange
    long = [(TWO, results(TWO, "a" * 300 + "b" * 300, "x")), *DIALOGUE[2:]]
    assert not found(chat, dialogue=long)

    def shortened(self: Template, reply: Reply, answers: Any) -> Any:
        cut = [dataclasses.replace(m, content=f"{m.content[:128]}...{m.content[-128:]}") for m in answers]
        return exchange(self, reply, cut)

    monkeypatch.setattr(Template, "_exchange", shortened)
    assert "the prompt after turn 0 lacks a message" in found(chat, dialogue=long)


@pytest.mark.parametrize(("room", "goes_on"), [(2, True), (1, True), (0, False), (-1, False)])
def test_a_result_that_just_fits_is_kept(room: int, goes_on: bool) -> None:
    chat = chat_of("qwen2_5")
    turns = turns_of(chat, DIALOGUE)
    whole = play(chat, OPENING, turns)
    used = sum(len(turn.prompt_ids) for turn in whole.turns[:2]) + len(whole.turns[0].action_ids)
    trajectory = play(chat, OPENING, turns, max_tokens=used + room)
    assert trajectory.turns[0].observation == DIALOGUE[0][1]
    assert len(trajectory.turns) >= 2 if goes_on else len(trajectory.turns) == 1
    if not goes_on:
        assert trajectory.stop_reason is StopReason.MAX_TOKENS and trajectory.reward == 0.0


def test_a_parser_that_knows_calls_on_the_commentary_channel_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = '<|channel|>analysis to=functions.get_line<|message|>{"line_id": "L1"}'
    assert FORMATS["harmony"].read(output).calls
    strict = harmony._HEADER.pattern.replace("analysis|commentary|final", "commentary|final")
    monkeypatch.setattr(harmony, "_HEADER", re.compile(strict))
    assert not FORMATS["harmony"].read(output).calls


def test_channels_rendered_anew_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, spoken = chat_of("harmony"), Template._spoken
    assert not found(chat, "harmony")

    def without_thinking(self: Template, reply: Reply) -> dict[str, Any]:
        return spoken(self, dataclasses.replace(reply, thinking=""))

    turns = [(thoughtful(chat, "harmony", ids), f, answer) for ids, f, answer in turns_of(chat, DIALOGUE)]
    kept = play(chat, OPENING, turns)
    assert not kept.turns[1].forks, "thinking before a call stays until the answer"
    monkeypatch.setattr(Template, "_spoken", without_thinking)
    assert play(chat, OPENING, turns).turns[1].forks, "never patched silently: the row forks"


def test_a_developers_message_or_a_schemas_field_that_a_template_drops_is_noticed() -> None:
    def prompt(**flags: Any) -> str:
        chat = Chat(tokenizer_of("harmony"), "", TOOLS)
        for flag, value in flags.items():
            setattr(chat.template, flag, value)
        return str(chat.tokenizer.decode(chat.start(OPENING)))

    assert "surname" in prompt()
    assert "surname" not in prompt(_tools=TOOLS)


def test_a_stop_token_that_the_sampler_does_not_know_is_noticed() -> None:
    chat = chat_of("harmony")
    ids = chat.action_ids(TWO)
    assert ids[-1] in chat.stop_ids and not set(ids[:-1]) & set(chat.stop_ids)
    assert ids[-1] != chat.tokenizer.eos_token_id, "a sampler that stops at eos alone never ends this turn"


def test_words_meant_for_nobody_do_not_reach_the_user() -> None:
    for name in ("qwen3", "qwen3_thinking", "harmony", "deepseek_r1"):
        chat = chat_of(name)
        ids = thoughtful(chat, name, chat.action_ids(Action(text="Hello.")))
        prompt = chat.start(OPENING)
        assert chat.parse(ids, "stop", prompt).text == "Hello."
        if chat.parse(ids, "stop").text != "Hello.":
            assert name == "harmony"
    chat = chat_of("qwen3_thinking")
    unclosed = chat.tokenizer.encode("I wonder<|im_end|>", add_special_tokens=False)
    assert chat.parse(unclosed, "stop", chat.start(OPENING)).error, "the prompt had opened the thinking"
    assert chat.parse(unclosed, "stop").text == "I wonder"
