from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkflex.envs.env import Action
from sinkflex.policy.toolcalls import PARSERS, parse_compact, parse_hermes

BAD = {
    "compact": ["", "  ", "<|call|>", '<|call|>f {"a": 1', "<|call|>f [1]", "text <|call|>f {}", '<|call|>f {"a" 1}'],
    "hermes": [
        "",
        "<tool_call>{}",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
    ],
}


@pytest.mark.parametrize(("format", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_malformed_call_is_an_error_and_never_a_text_for_the_user(format: str, text: str) -> None:
    action = PARSERS[format](text)
    assert action.error
    assert action.text is None and not action.tool_calls


@pytest.mark.parametrize("value", [r'"\ud800"', r'{"\udfff": 1}', "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 99999])
def test_arguments_that_python_reads_but_no_file_can_hold_are_an_error(value: str) -> None:
    for action in (
        parse_compact(f'<|call|>f {{"a": {value}}}'),
        parse_hermes(f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'),
    ):
        assert action.error and not action.tool_calls
        action.error.encode()
    assert parse_hermes(r'<tool_call>{"name": "\ud800", "arguments": "["}</tool_call>').error.encode()  # type: ignore


def test_several_calls_keep_their_order_and_get_ids_of_their_own() -> None:
    for action in (
        parse_compact('<|call|>a {"x": 1}<|call|>b {}'),
        parse_hermes('<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "b"}</tool_call>'),
    ):
        assert [(c.name, dict(c.arguments)) for c in action.tool_calls] == [("a", {"x": 1}), ("b", {})]
        assert len({c.id for c in action.tool_calls}) == 2


def test_arguments_written_as_a_json_string_are_read_once() -> None:
    body = {"name": "a", "arguments": json.dumps({"x": 1})}
    action = parse_hermes(f"<tool_call>{json.dumps(body)}</tool_call>")
    assert action.tool_calls[0].arguments == {"x": 1}


def test_text_beside_hermes_calls_is_not_shown_to_the_user() -> None:
    action = parse_hermes('I should look.<tool_call>{"name": "a"}</tool_call>')
    assert action.text is None
    assert action.tool_calls[0].name == "a"


@given(
    st.text(alphabet=st.sampled_from('<|cal>{}[]":,ab tool_/1\\n'), max_size=80), st.sampled_from(["compact", "hermes"])
)
def test_any_text_gives_exactly_one_of_text_calls_and_error(text: str, format: str) -> None:
    action = PARSERS[format](text)
    assert isinstance(action, Action)
    assert (action.text is not None) + bool(action.tool_calls) + (action.error is not None) == 1
