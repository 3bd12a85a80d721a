# ruff: noqa: E501
"""Each format reads what models write, says what is wrong with the rest, and neither loses nor invents a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls import FORMATS, format_for
from sinkflex.policy.toolcalls.reply import Reply, call_id

PY = "<|python_tag|>"
DS, DC = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CB, SEP, CE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
A = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
X1 = [("f", {"x": 1})]

# format: (output, its calls, its text, its thinking)
READ: list[tuple[str, str, list[tuple[str, Any]], str, str]] = [
    ("compact", '<|call|>f {"x": 1}<|call|>g {}', [*X1, ("g", {})], "", ""),
    ("compact", "<|call|>f", [("f", {})], "", ""),
    ("compact", '<|call|>f {"x": "<|call|>g {}"}', [("f", {"x": "<|call|>g {}"})], "", ""),
    ("compact", "Hello. ", [], "Hello.", ""),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', X1, "", ""),
    ("hermes", 'A.<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call> B.', X1, "A.\nB.", ""),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_call>', [*X1, ("g", {})], "", ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', [("f", {"x": "</tool_call>"})], "", ""),
    ("hermes", '<think>\nf?\n</think>\n\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', X1, "", "<think>\nf?\n</think>"),
    ("hermes", '<think><tool_call>{"name": "f"}</tool_call></think>Hello.', [], "Hello.", '<think><tool_call>{"name": "f"}</tool_call></think>'),
    ("hermes", "f?\n</think>\n\nHello.", [], "Hello.", "f?\n</think>"),
    ("hermes", 'I<think>f?</think> look.<tool_call>{"name": "f", "arguments": {"x": "<think></think>"}}</tool_call>', [("f", {"x": "<think></think>"})], "I look.", "<think>f?</think>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', [("f", {"x": "</think>"})], "", ""),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", X1, "", ""),
    ("qwen_xml", "A.<tool_call><function=f><parameter=x>1</parameter></function></tool_call>\n<tool_call><function=g></function></tool_call>", [*X1, ("g", {})], "A.", ""),
    ("qwen_xml", "<tool_call><function=f><parameter=x>\n\na\nb <tool_call>\n\n</parameter></function></tool_call>", [("f", {"x": "\na\nb <tool_call>\n"})], "", ""),
    ("qwen_xml", "<tool_call><function=f><parameter=a>True</parameter><parameter=b>[1, null]</parameter><parameter=c>NaN</parameter></function></tool_call>", [("f", {"a": True, "b": [1, None], "c": "NaN"})], "", ""),
    ("qwen_xml", "f?\n</think>\n\nHello.", [], "Hello.", "f?\n</think>"),
    ("llama", '{"name": "f", "parameters": {"x": 1}}', X1, "", ""),
    ("llama", '{"type": "function", "name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', [*X1, ("g", {})], "", ""),
    ("llama", f'I look.{PY}{{"name": "f", "parameters": {{"x": 1}}}}', X1, "I look.", ""),
    ("llama", f'{PY}f.call(x=1)', X1, "", ""),
    ("llama", f'{PY}web.search.call(query="a, b(c)", deep=True)', [("web.search", {"query": "a, b(c)", "deep": True})], "", ""),
    ("llama", "[f(x=1), g(names=['a', None])]", [*X1, ("g", {"names": ["a", None]})], "", ""),
    ("llama", "note(x=1)", [], "note(x=1)", ""),
    ("llama", "[see note (x)]", [], "[see note (x)]", ""),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefgh1"}]', X1, "", ""),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]abcdefgh1[ARGS]{}', [*X1, ("g", {})], "", ""),
    ("mistral", 'I look.[TOOL_CALLS]f{"x": "[TOOL_CALLS]"}', [("f", {"x": "[TOOL_CALLS]"})], "I look.", ""),
    ("deepseek", f'{DS}{CB}f{SEP}{{"x": 1}}{CE}{CB}g{SEP}{{}}{CE}{DC}', [*X1, ("g", {})], "", ""),
    ("deepseek", f'I look.{DS}{CB}function{SEP}f\n```json\n{{"x": 1}}\n```{CE}\n{CB}function{SEP}g\n```json\n{{}}\n```{CE}{DC}', [*X1, ("g", {})], "I look.", ""),
    ("deepseek", f'{CB}function{SEP}{{"x": "{CE}"}}{CE}', [("function", {"x": CE})], "", ""),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}', X1, "", ""),
    ("harmony", '<|channel|>commentary to=functions.f json<|message|>{"x": 1}', X1, "", ""),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"x": 1}', X1, "", ""),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', X1, "", ""),
    ("harmony", ' to=functions.f<|channel|>analysis<|constrain|>json<|message|>{"x": 1}', X1, "", ""),
    ("harmony", f'{A}<|channel|>analysis to=functions.f<|message|>{{"x": 1}}', X1, "", "I look."),
    ("harmony", f'{A}<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"x": 1}}', X1, "One moment.", "I look."),
    ("harmony", f'{A}<|channel|>commentary to=functions.f<|message|>{{"x": 1}}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{{}}', [*X1, ("g", {})], "", "I look."),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"x": "<|end|>"}', [("f", {"x": "<|end|>"})], "", ""),
    ("harmony", f"{A}<|channel|>final<|message|>Hello.", [], "Hello.", "I look."),
    ("harmony", "<|channel|>commentary<|message|>One moment.", [], "One moment.", ""),
    ("harmony", "Hello.", [], "Hello.", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "output", "calls", "text", "thinking"), READ)
def test_what_models_write_is_read(
    name: str, output: str, calls: list[tuple[str, Any]], text: str, thinking: str
) -> None:
    reply = FORMATS[name].read(output)
    assert not reply.error
    assert [(c.name, c.arguments) for c in reply.calls] == calls
    assert (reply.text, reply.thinking) == (text, thinking)
    action = reply.action("raw")
    assert action.text == (None if calls else text)
    assert action.raw == "raw"


BAD = {
    "compact": ['<|call|>f {"a": 1', "<|call|>f [1]", "text <|call|>f {}", '<|call|>f {"a" 1}', "<|call|>", "<|call|>f {} x"],
    "hermes": [
        "<tool_call>{}", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}', '{"name": "f"}</tool_call>', "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "argument": {"x": 1}}</tool_call>', "<tool_call>f(x=1)</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": 1, "x": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{} {}"}</tool_call>',
        '<tool_call>{"name": "f"}{"name": "g"}</tool_call>', "<think>I wonder", '<think><tool_call>{"name": "f"}</tool_call>',
    ],
    "qwen_xml": [
        "<tool_call>", "<tool_call>f</tool_call>", "<tool_call><function=f></tool_call>", "<function=f></function>",
        "<tool_call><function=f><parameter=x>1</function></tool_call>", "<tool_call><function=f></function>",
        "<tool_call><function=f><parameter=x>1</parameter>2</function></tool_call>", "Hello.</tool_call>",
        "<tool_call><function=f><parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>",
        "<tool_call><function= ></function></tool_call>", "<think>I wonder",
    ],
    "llama": [
        '{"name": "f", "parameters": {', '{"x": 1}', f"{PY}f(1)", f"{PY}f(x=1", f"{PY}print 1", f"{PY}f(x=g())", PY,
        'Sure. {"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}} and more', "[f(x=1), 2]",
        f"{PY}f(x={{1}})", f"{PY}f(x=b'1')", f"{PY}f(x=1, x=2)", f"{PY}f(**{{}})", f"{PY}" + "f(x=" + "[" * 5000,
        f"{PY}f(x=" + "-" * 15000 + "1)", f"{PY}f(x='{'a' * 30000}')",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[TOOL_CALLS] []", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]",
        '[TOOL_CALLS] [{"name": "f"}] more', 'f[ARGS]{"x": 1}', '[TOOL_CALLS]f[ARGS]{"x": 1',
        '[TOOL_CALLS] [{"name": "f", "id": "a"}, {"name": "g", "id": "a"}]',
    ],
    "deepseek": [
        f"{DS}{DC}", f'{CB}f{SEP}{{"x": 1}}', f'{CB}f{SEP}{{"x": 1{CE}', f"{CB}{SEP}{{}}{CE}", f'f{SEP}{{"x": 1}}{CE}',
        f"{DS}{CB}f{SEP}{{}}{CE}{DC} more", f"{DS}I look.", f"{CB}function{SEP}f{CE}", f"{CB}f{SEP}1{CE}",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.f<|message|>{", "<|channel|>commentary to=python<|message|>{}",
        "<|channel|>commentary to=functions.f<|message|>{} more", "<|channel|>secret<|message|>Hello.", "<|channel|>final",
        "<|channel|>analysis<|message|>a<|end|>Hello.", "<|channel|>commentary to=functions.f",
        "<|channel|>final to=functions.f<|message|>{}", " to=functions.f<|channel|>commentary to=functions.g<|message|>{}",
        "<|channel|>commentary to=functions.<|message|>{}", "<|channel|>final<|message|>a<|channel|>b", "to=functions.f {}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "output"), [(name, output) for name, outputs in BAD.items() for output in outputs])
def test_a_malformed_output_is_an_error_that_keeps_it_whole_and_reaches_no_user(name: str, output: str) -> None:
    reply = FORMATS[name].read(output)
    assert reply.error and not reply.calls and reply.text == output
    action = reply.action("raw")
    assert action.error == reply.error and action.text is None and not action.tool_calls
    assert len(action.error) < 300, "a model pays for every token of it"
    action.error.encode()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("output", ["", "  \n", "<think>a</think>  "])
def test_an_output_that_says_nothing_is_an_error(name: str, output: str) -> None:
    if name != "harmony" or not output.strip():
        assert FORMATS[name].read(output).action("").error == "empty message"


def test_only_thinking_in_harmony_is_an_error() -> None:
    assert FORMATS["harmony"].read("<|channel|>analysis<|message|>Hm.").action("").error == "empty message"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "qwen_xml"])
@pytest.mark.parametrize("value", [r'"\ud800"', r'{"\udfff": 1}', "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 99999])
def test_arguments_that_python_reads_but_no_file_can_hold_are_an_error(name: str, value: str) -> None:
    output = FORMATS[name].write([ToolCall("f", {"a": "VALUE"}, call_id(0))]).replace('"VALUE"', value)
    reply = FORMATS[name].read(output)
    assert reply.error and not reply.calls
    reply.error.encode()


def test_what_qwen_xml_cannot_take_for_json_is_text_and_the_schema_decides_what_is_not_clear() -> None:
    def said(value: str, **schema: Any) -> Any:
        tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
        knowing = FORMATS["qwen_xml"].knowing
        assert knowing is not None
        output = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
        (call,) = knowing(tools)(output).calls
        json.dumps(dict(call.arguments), allow_nan=False).encode()
        return call.arguments["a"]

    for value in (r'"\ud800"', "NaN", "-Infinity", "1e999", "9" * 5000, "[" * 99999, "{", ""):
        assert said(value) == value
    optional: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert (said("5"), said("5", type="string"), said("5", **optional)) == (5, "5", "5")
    assert (said("None", **optional), said("true", type="string"), said('"a"', type="string")) == (None, "true", '"a"')
    assert (said("2.0", type="number"), said("5", type=["string", "integer"]), said("x", type="integer")) == (
        2.0,
        5,
        "x",
    )
    assert (
        FORMATS["qwen_xml"].read("<tool_call><function=f><parameter=a>\ud800</parameter></function></tool_call>").error
    )


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_keep_their_order_and_get_ids_of_their_own(name: str) -> None:
    calls = [ToolCall(f"f{k}", {"x": k}, call_id(k)) for k in range(12)]
    read = FORMATS[name].read(FORMATS[name].write(calls)).calls
    assert [(c.name, dict(c.arguments)) for c in read] == [(c.name, dict(c.arguments)) for c in calls]
    assert len({c.id for c in read}) == 12
    assert all(len(c.id) == 9 and c.id.isalnum() for c in read)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Reply("a "), Reply(" a"), True),
        (Reply("a"), Reply("b"), False),
        (Reply("a", "<think>b</think>"), Reply("a", "<think>\nb\n</think>"), True),
        (Reply("a", "<think></think>"), Reply("a"), False),
        (Reply(calls=(ToolCall("f", {"x": 1}),)), Reply(calls=(ToolCall("f", {"x": 1}, "id"),)), True),
        (Reply(calls=(ToolCall("f", {"x": 1}),)), Reply(calls=(ToolCall("f", {"x": True}),)), False),
        (Reply("a", error="b"), Reply("a", error="b"), False),
    ],
)
def test_two_turns_say_the_same_or_not(one: Reply, other: Reply, same: bool) -> None:
    assert one.says(other) is other.says(one) is same


def test_the_format_is_seen_from_template_or_vocabulary_and_never_guessed() -> None:
    assert format_for("auto", "{{ '<tool_call>' }}", {}, True).name == "hermes"
    assert format_for("auto", "plain", {"[TOOL_CALLS]": 7}, True).name == "mistral"
    assert format_for("llama", "{{ '<tool_call>' }}", {}, True).name == "llama"
    assert format_for("auto", "plain", {}, False).name == "hermes"
    with pytest.raises(ValueError, match=r"no tool calls in a format that is known.*prompt\.tool_format=hermes"):
        format_for("auto", "plain", {}, True)
    with pytest.raises(ValueError, match=r"there is no 'hermse'\. Did you mean hermes\?"):
        format_for("hermse", "plain", {}, True)


def test_arguments_written_as_a_json_string_are_read_once() -> None:
    body = {"name": "a", "arguments": json.dumps({"x": 1})}
    reply = FORMATS["hermes"].read(f"<tool_call>{json.dumps(body)}</tool_call>")
    assert reply.calls[0].arguments == {"x": 1}
