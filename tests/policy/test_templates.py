"""Every template under test: ids grow turn by turn as they are rendered at once, or the row forks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.policy.chat import Chat
from sinkflex.policy.toolcalls.reply import call_id
from sinkflex.rollout.scripted import Dialogue, encode
from tests.policy.exactness import Turns, faults, play
from tests.policy.template_cases import TOOLS, chat_of, names, tokenizer_of

NAMES = names()
THINKS = [name for name in NAMES if name.startswith(("qwen3", "harmony", "deepseek_r1")) and "instruct" not in name]
OPENING = (Message("user", "My line is dead."),)


def call(name: str, index: int, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, call_id(index))


def results(action: Action, *texts: str) -> tuple[Message, ...]:
    return tuple(Message("tool", text, tool_call_id=c.id) for c, text in zip(action.tool_calls, texts, strict=True))


ONE = Action(tool_calls=(call("get_line", 0, line_id="L1"),))
TWO = Action(tool_calls=(call("get_line", 0, line_id="L1", deep=True), call("book", 1, cabins=["a", "b"])))
DIALOGUE = [
    (ONE, results(ONE, '{"line_id": "L1"}')),
    (TWO, results(TWO, 'It is "on".\nAll of it.', "Error: no seats")),
    (Action(text="Please check the line."), (Message("user", "It is on.\n\nThanks."),)),
    (TWO, results(TWO, "same", "same")),
    (Action(text="Good."), (Message("user", "Bye."),)),
    (Action(text="Bye."), ()),
]


def turns_of(chat: Chat, dialogue: list[tuple[Action, tuple[Message, ...]]]) -> Turns:
    return [(chat.action_ids(action), "stop", answer) for action, answer in dialogue]


@pytest.mark.parametrize("name", NAMES)
def test_ids_turn_by_turn_equal_the_template_at_once_or_the_row_forks(name: str) -> None:
    chat = chat_of(name)
    turns = turns_of(chat, DIALOGUE)
    trajectory = play(chat, OPENING, turns)
    assert len(trajectory.turns) == len(DIALOGUE)
    assert not faults(chat, OPENING, trajectory, [ids for ids, _, _ in turns])
    forks = [turn.forks for turn in trajectory.turns]
    if name in ("qwen2_5", "smollm2", "mistral_args", "deepseek_v3_1"):
        assert not any(forks)
    if name in ("qwen3_thinking", "deepseek_r1"):
        assert all(forks[1:2] + forks[3:4])  # the thinking that the prompt opened is dropped


words = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]{}|｜", exclude_categories=["Cs", "Cc"]), min_size=1
)
texts = words.filter(lambda text: text.strip() and text.strip()[0] not in "(\"'")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
actions = st.builds(lambda text: Action(text=text.strip()), texts) | st.builds(
    lambda calls: Action(
        tool_calls=tuple(ToolCall(name, arguments, call_id(k)) for k, (name, arguments) in enumerate(calls))
    ),
    st.lists(
        st.tuples(st.sampled_from(["get_line", "book"]), st.dictionaries(words, values, max_size=3)),
        min_size=1,
        max_size=3,
    ),
)


@st.composite
def dialogues(draw: st.DrawFn) -> list[tuple[Action, tuple[Message, ...]]]:
    said = []
    for action in draw(st.lists(actions, min_size=1, max_size=4)):
        heard = [draw(texts) for _ in action.tool_calls]
        said.append((action, results(action, *heard) if heard else (Message("user", draw(texts)),)))
    return said


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(dialogue=dialogues())
def test_random_dialogues_are_exact(name: str, dialogue: list[tuple[Action, tuple[Message, ...]]]) -> None:
    chat = chat_of(name)
    turns = turns_of(chat, dialogue)
    trajectory = play(chat, OPENING, turns)
    assert not faults(chat, OPENING, trajectory, [ids for ids, _, _ in turns])
    for turn, (action, _) in zip(trajectory.turns, dialogue, strict=True):
        assert (turn.action.text, turn.action.error) == (action.text, None)
        assert json.dumps([(c.name, c.arguments) for c in turn.action.tool_calls]) == json.dumps(
            [(c.name, c.arguments) for c in action.tool_calls]
        )


def thoughtful(chat: Chat, name: str, ids: list[int]) -> list[int]:
    """Return the ids of a turn with thinking before it."""
    text = chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if "harmony" in name or "gptoss" in name:
        text = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant" + text
    elif "</think>" in text:
        text = re.sub(r"(<think>\n|\A)\n*</think>", r"\1Let me see.\n</think>", text)
    else:
        text = f"<think>\nLet me see.\n</think>\n\n{text}"
    return chat.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", THINKS)
def test_dropped_thinking_forks_the_row_and_every_sampled_id_is_trained_once(name: str) -> None:
    chat = chat_of(name)
    turns = [(thoughtful(chat, name, ids), finish, answer) for ids, finish, answer in turns_of(chat, DIALOGUE)]
    trajectory = play(chat, OPENING, turns)
    assert not faults(chat, OPENING, trajectory, [ids for ids, _, _ in turns])
    assert all("Let me see." in turn.action.raw for turn in trajectory.turns)
    assert [turn.action.text for turn in trajectory.turns if turn.action.text] == [
        "Please check the line.",
        "Good.",
        "Bye.",
    ]
    after_words = [k + 1 for k, (action, _) in enumerate(DIALOGUE[:-1]) if action.text]
    assert all(trajectory.turns[k].forks for k in after_words)
    last = chat.tokenizer.decode(trajectory.turns[-1].prompt_ids)
    assert "Let me see." not in last, "the template drops it, so the prompt must not show it"
    if name in ("qwen3", "qwen3_thinking"):  # thinking stays until the next question
        assert not trajectory.turns[1].forks and not trajectory.turns[2].forks


@pytest.mark.parametrize("name", NAMES)
def test_sampled_ids_that_would_be_encoded_otherwise_stay_as_sampled(name: str) -> None:
    chat = chat_of(name)
    whole = chat.action_ids(Action(text="Please check the line."))
    piece = chat.tokenizer.encode("Please check the line.", add_special_tokens=False)
    text = chat.tokenizer.decode(whole[:-1], clean_up_tokenization_spaces=False)
    before, _, after = text.partition("Please check the line.")
    byte_by_byte = [i for c in "Please check the line." for i in chat.tokenizer.encode(c, add_special_tokens=False)]
    odd = [
        *chat.tokenizer.encode(before, add_special_tokens=False),
        *byte_by_byte,
        *chat.tokenizer.encode(after, add_special_tokens=False),
        whole[-1],
    ]
    assert len(byte_by_byte) > len(piece)
    trajectory = play(chat, OPENING, [(odd, "stop", (Message("user", "Yes."),)), (whole, "stop", ())])
    assert trajectory.turns[0].action_ids == odd
    assert trajectory.turns[0].action.text == "Please check the line."
    usual = play(chat, OPENING, [(whole, "stop", (Message("user", "Yes."),)), (whole, "stop", ())])
    assert trajectory.turns[1].prompt_ids == usual.turns[1].prompt_ids


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_cut_by_its_limit_is_closed_by_the_template_and_kept_verbatim(name: str) -> None:
    chat = chat_of(name)
    for action in (Action(text="Please check the line."), TWO):
        cut_off = chat.action_ids(action)[:-3]
        heard = (Message("tool", "Error: cut off", error=True),)
        trajectory = play(chat, OPENING, [(cut_off, "length", heard), (chat.action_ids(ONE), "stop", ())])
        assert "cut off" in str(trajectory.turns[0].action.error)
        assert trajectory.turns[0].action_ids == cut_off
        prompt = chat.tokenizer.decode(trajectory.turns[1].prompt_ids)
        assert "Error: cut off" in prompt
        if not trajectory.turns[1].forks:
            assert trajectory.turns[1].prompt_ids[0] in chat.stop_ids


@pytest.mark.parametrize("name", NAMES)
def test_a_malformed_call_stays_in_the_prompt_and_is_answered_by_an_error(name: str) -> None:
    chat = chat_of(name)
    text = chat.tokenizer.decode(chat.action_ids(ONE)[:-1], clean_up_tokenization_spaces=False)
    whole, part = ('"L1"', '"L1') if '"L1"' in text else ("L1\n</parameter>", "L1\n</function>")
    broken = text.replace(whole, part, 1)
    assert broken != text
    sampled = [*chat.tokenizer.encode(broken, add_special_tokens=False), chat.action_ids(ONE)[-1]]
    heard = (Message("tool", "Error: not JSON", error=True),)
    trajectory = play(chat, OPENING, [(sampled, "stop", heard), (chat.action_ids(ONE), "stop", ())])
    first, second = trajectory.turns
    assert first.action.error and not first.action.tool_calls and first.action.text is None
    assert first.action_ids == sampled
    shown = chat.tokenizer.decode([*(() if second.forks else sampled), *second.prompt_ids])
    assert part in shown and "Error: not JSON" in shown


@pytest.mark.parametrize("name", NAMES)
def test_arguments_as_a_mapping_and_as_json_text_give_the_same_ids(name: str) -> None:
    chat = chat_of(name)
    arguments = {"line_id": 'L"1"', "deep": True}
    ids = [
        chat.start([*OPENING, Message("assistant", "", (ToolCall("get_line", form, call_id(0)),)), *results(ONE, "x")])
        for form in (arguments, json.dumps(arguments))  # type: ignore[arg-type]
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("name", NAMES)
def test_every_message_and_every_field_of_a_schema_shows_in_the_prompt(name: str) -> None:
    chat = chat_of(name)
    prompt = chat.tokenizer.decode(chat.start([Message("system", "First rule."), *OPENING]))
    for word in ("Be kind.", "First rule.", "My line is dead.", "get_line", "deep", "passengers", "surname", "cabins"):
        assert word in prompt
    chat.start([Message("developer", "A rule."), *OPENING] if "mistral" not in name else OPENING)


@pytest.mark.parametrize("name", ["qwen2_5", "smollm2", "llama3", "deepseek_v3_1"])
def test_a_developers_message_is_never_lost(name: str) -> None:
    chat = Chat(tokenizer_of(name), "", [], tool_format="auto")
    prompt = chat.tokenizer.decode(chat.start([Message("developer", "A rule of the developer."), *OPENING]))
    assert "A rule of the developer." in prompt


def ordinary(dialogue: list[tuple[Action, tuple[Message, ...]]], as_text: bool) -> list[dict[str, Any]]:
    """Return a dialogue in the form that OpenAI's interface has."""
    forms: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": OPENING[0].content},
    ]
    for action, answer in dialogue:
        form: dict[str, Any] = {"role": "assistant", "content": action.text}
        if action.tool_calls:
            form["tool_calls"] = [
                {
                    "type": "function",
                    "id": c.id,
                    "function": {"name": c.name, "arguments": json.dumps(c.arguments) if as_text else c.arguments},
                }
                for c in action.tool_calls
            ]
        forms.append(form)
        forms += [
            {"role": m.role, "content": m.content} | ({"tool_call_id": m.tool_call_id} if m.role == "tool" else {})
            for m in answer
        ]
    return forms


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_thinking", "mistral", "mistral_args"])
def test_prompts_are_those_of_transformers(name: str) -> None:
    chat = chat_of(name)
    trajectory = play(chat, OPENING, turns_of(chat, DIALOGUE))
    context: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        context = turn.prompt_ids if turn.forks else context + turn.prompt_ids
        reference = chat.tokenizer.apply_chat_template(
            ordinary(DIALOGUE[:number], as_text=False), tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert context == reference, f"turn {number}"
        context = context + turn.action_ids


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_are_read_back_even_where_a_template_inserts_thinking(name: str) -> None:
    chat = chat_of(name)
    trajectory = encode(
        Dialogue("t", 0, OPENING, DIALOGUE, 1.0, {"stop_reason": "user_stop", "reward_parts": {}}), chat, 10**6
    )
    assert [turn.action.text for turn in trajectory.turns] == [action.text for action, _ in DIALOGUE]


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("qwen2_5", {"<|im_end|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("llama3", {"<|eot_id|>", "<|eom_id|>"}),
        ("harmony", {"<|return|>", "<|call|>"}),
        ("smollm2", {"<|im_end|>"}),
        ("mistral", {"</s>"}),
        ("deepseek_v3_1", {"<｜end▁of▁sentence｜>"}),
    ],
)
def test_the_sampler_stops_where_a_template_ends_a_turn(name: str, stops: set[str]) -> None:
    chat = chat_of(name)
    assert set(chat.tokenizer.convert_ids_to_tokens(list(chat.stop_ids))) == stops


def test_a_base_models_eos_does_not_hide_the_token_that_ends_a_turn() -> None:
    tokenizer = type(tokenizer_of("qwen2_5"))(
        tokenizer_object=tokenizer_of("qwen2_5")._tokenizer,  # type: ignore[attr-defined]
        eos_token="<|endoftext|>",
    )
    tokenizer.chat_template = tokenizer_of("qwen2_5").chat_template
    assert Chat(tokenizer, "", []).template.stops == ("<|im_end|>", "<|endoftext|>")


def test_a_prompt_does_not_depend_on_the_day() -> None:
    prompt = chat_of("harmony").tokenizer.decode(chat_of("harmony").start(OPENING))
    assert "Current date: 2026-01-01\n" in prompt
