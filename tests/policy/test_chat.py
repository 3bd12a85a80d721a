from __future__ import annotations

import pytest

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.policy.chat import Chat, assistant_message
from tests.policy.tiny_policy import TOOLS, tiny_policy

REWRITES_HISTORY = """\
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}<|assistant|>{{ m.content.split('//')[-1] if not loop.last else m.content }}<|end|>
{%- else -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

CONVERSATION = (
    (Message("user", "My line is dead."),),
    Action(tool_calls=(ToolCall("get_line", {"line_id": "L1", "deep": True}, "call_0"), ToolCall("get_line", {}, "c"))),
    (Message("tool", '{"line_id": "L1"}', tool_call_id="call_0"), Message("tool", "Error", tool_call_id="c")),
    Action(text="Please check the line."),
    (Message("user", "It is on."),),
    Action(text="Good."),
    (Message("user", "Bye."),),
)


# Calls as Hermes and Qwen write them, and a line break after the token that ends a turn.
CHATML = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def chat(template: str | None = None, tools: list[dict] | None = None, tool_format: str = "auto") -> Chat:
    tokenizer = tiny_policy().tokenizer
    if template is None:
        return Chat(tokenizer, "Be kind.", TOOLS)
    copy = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    copy.chat_template = template
    return Chat(copy, "", tools or [], tool_format=tool_format)


def ids_turn_by_turn(format: Chat) -> tuple[list[int], list[bool], list[Message]]:
    history = list(CONVERSATION[0])
    ids, forked = format.start(history), []
    for action, reply in zip(CONVERSATION[1::2], CONVERSATION[2::2], strict=True):
        ids = ids + format.action_ids(action)
        history.append(assistant_message(action))
        new, forks = format.extend(history, reply, "stop")
        ids = new if forks else ids + new
        forked.append(forks)
        history += reply
    return ids, forked, history


@pytest.mark.parametrize("template", [None, CHATML])
def test_ids_added_turn_by_turn_equal_the_template_rendered_at_once(template: str | None) -> None:
    format = chat(template, TOOLS)
    ids, forked, history = ids_turn_by_turn(format)
    assert ids == format.start(history)
    assert not any(forked)


def test_the_end_of_a_turn_that_was_cut_off_is_closed_by_the_template() -> None:
    format = chat()
    history = [*CONVERSATION[0], Message("assistant", "Good.")]
    whole, _ = format.extend(history, (Message("user", "Bye."),), "length")
    stopped, _ = format.extend(history, (Message("user", "Bye."),), "stop")
    assert whole == [format.stop_ids[0], *stopped]


def test_a_template_that_rewrites_history_forks_the_turn_with_a_whole_new_prompt() -> None:
    format = chat(REWRITES_HISTORY)
    history = [Message("user", "Hi."), Message("assistant", "secret//Hello.")]
    ids, forks = format.extend(history, (Message("user", "Bye."),), "stop")
    assert forks
    assert ids == format.start([*history, Message("user", "Bye.")])
    assert "secret" not in format.tokenizer.decode(ids)


@pytest.mark.parametrize("action", CONVERSATION[1::2])
def test_the_ids_of_an_action_parse_back_to_it(action: Action) -> None:
    format = chat()
    parsed = format.parse(format.action_ids(action), "stop")
    assert (parsed.text, [(c.name, c.arguments) for c in parsed.tool_calls]) == (
        action.text,
        [(c.name, c.arguments) for c in action.tool_calls],
    )


def test_a_turn_cut_by_its_limit_is_a_parse_error_and_no_text_for_the_user() -> None:
    format = chat()
    action = format.parse(format.action_ids(Action(text="Please check the line."))[:-1], "length")
    assert action.text is None
    assert "cut off" in str(action.error)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_policy().tokenizer
    bare = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>")
    with pytest.raises(ValueError, match="no chat template"):
        Chat(bare, "", [])


@pytest.mark.parametrize(
    ("template", "tool_format", "line"),
    [
        (CHATML, "hermse", "Did you mean hermes"),
        (CHATML.replace("tool_call>", "function_call>"), "auto", "does not read back"),
        (CHATML.replace("c.function.arguments}", "{}}"), "auto", "does not read back"),
        (CHATML.replace("{{ m.content }}", ""), "auto", "does not show what the assistant says"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), "auto", "does not show what the assistant says"),
        (CHATML.replace("<|end|>", ""), "auto", "holds no special token"),
        ("{{ raise_exception('no system, please') }}", "auto", "refuses the conversation: no system, please"),
    ],
)
def test_a_template_whose_actions_cannot_be_read_back_is_refused_at_once(
    template: str, tool_format: str, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        chat(template, TOOLS, tool_format=tool_format)


def test_calls_stand_in_the_text_where_a_format_is_named_that_the_template_does_not_write() -> None:
    format = chat(CHATML, TOOLS, tool_format="mistral")
    ids, forked, history = ids_turn_by_turn(format)
    assert ids == format.start(history)
    assert not any(forked)
    assert "[TOOL_CALLS] [" in format.tokenizer.decode(ids)
