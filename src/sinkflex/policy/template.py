"""A chat template as text: what it writes for a conversation, and what a reply adds to it.

Templates differ in what they can express. What one cannot do is found out once, with short probes, and done around it:
tools it does not show are listed in the system text, calls it does not write stand in the assistant's text, calls it
writes only one at a time alternate with their results, and a role it refuses becomes one that it knows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.policy.toolcalls import AUTO, format_for
from sinkflex.policy.toolcalls.reply import CLOSE_THINKING, OPEN_THINKING, Reply, call_id, write_json

# Some templates write the day. A run that goes on tomorrow needs today's prompts, so it is always this day.
_TODAY = (
    "{%- macro strftime_now(format) -%}"
    "{{ '01 January 2026' if '%B' in format else '01 Jan 2026' if '%b' in format else '2026-01-01' }}"
    "{%- endmacro -%}"
)
_RESULT = "<tool_response>\n{}\n</tool_response>"
_QUESTION = Message("user", "A first question.")
_WORDS = "Some words."


class Template:
    """Renders one kind of conversation: a tokenizer's chat template, a system text and tool schemas.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        system: the system text ("" for none).
        tools: tool schemas in OpenAI form.
        tool_format: name of a format of `policy/toolcalls`, or "auto".

    Attributes:
        source: the template.
        format: how calls are written.
        read: what a turn says; see `Format.read`.
        stops: the tokens that end a turn; the first one ends a text.

    Raises:
        ValueError: the template refuses a simple conversation, or what it writes cannot be read back.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system: str, tools: Sequence[dict[str, Any]], tool_format: str
    ) -> None:
        source = tokenizer.get_chat_template(tools=list(tools) or None)
        self.source = _TODAY + source if "strftime_now" in source else source
        self.format = format_for(tool_format, source, tokenizer.get_vocab(), bool(tools))
        self.read = lru_cache(maxsize=2048)(self.format.knowing(tools) if self.format.knowing else self.format.read)
        self._apply: Callable[..., Any] = tokenizer.apply_chat_template
        self._system = system
        self._tools: list[dict[str, Any]] | None = list(tools) or None
        self._is_auto = tool_format == AUTO
        self._arguments: Callable[[Any], Any] = dict
        self._no_text: str | None = ""
        self._writes_calls = self._writes_several = True
        self._error_role, self._developer_role = "tool", "developer"
        self.stops: tuple[str, ...] = ()
        self.stops = self._find_stops(tokenizer)
        self._stop = re.compile("|".join(map(re.escape, self.stops)))
        if self._tools:
            self._show_tools(self._tools)
            self._find_how_calls_are_written(self._tools)
        self._find_roles()
        self.turn(Action(text=_WORDS))

    def render(self, messages: Sequence[Message], generation: bool, head: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: the conversation; a system message at its beginning joins the system text.
            generation: end with the prompt for the assistant's turn.
            head: with system text and tools.

        Raises:
            ValueError: the template refuses it.
        """
        system = self._system if head else ""
        if messages and messages[0].role == "system":  # a method's text, in a fixed place after the system text
            system, messages = "\n\n".join(filter(None, (system, messages[0].content))), messages[1:]
        try:
            return self._apply(
                [*([{"role": "system", "content": system}] if system else []), *self._forms(messages)],
                tools=self._tools if head else None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # a template is a program, and fails in any way
            raise ValueError(f"the model's chat template refuses the conversation: {error}") from error

    def reply(self, message: Message) -> Reply:
        """Return what an assistant message says: read if it is a whole sampled turn, else as it is."""
        if stop := self.stop_of(message.content):
            return self.read(message.content.removesuffix(stop))
        calls = (replace(call, arguments=_mapping(call.arguments)) for call in message.tool_calls)
        return Reply(message.content, calls=tuple(calls))

    def stop_of(self, text: str) -> str:
        """Return the stop token that a text ends with, or ""."""
        return next((stop for stop in self.stops if text.endswith(stop)), "")

    def turn(self, action: Action) -> str:
        """Return the text that an assistant would sample to do this, its stop token included.

        Raises:
            ValueError: it cannot be written so that it can be read back.
        """
        wanted = Reply(action.text or action.error or "", calls=action.tool_calls)
        before = self.render((_QUESTION,), generation=True, head=False)
        whole = self.render((_QUESTION, _assistant(wanted)), generation=False, head=False)
        turn, lead = _after(before, whole)
        ends = list(self._stop.finditer(turn))
        if ends:
            closing = "" if lead == open_thinking(before) else f"{CLOSE_THINKING}\n\n"
            for text in (turn[: ends[-1].start()], self.format.write(action.tool_calls)):
                if not self._stop.search(text) and self._reads(lead + text, wanted):
                    return closing + text + ends[-1].group()
        raise self._unreadable(whole, wanted)

    def tail(self, history: Sequence[Message], reply: Sequence[Message], finish: str, head: bool = True) -> str | None:
        """Return what follows the last sampled token, or None where the template rewrites what stands before it.

        Args:
            history: the conversation, ending with the assistant message just sampled.
            reply: the environment's messages.
            finish: "stop" if a stop token was sampled, "length" if the turn was cut (the template closes it).
            head: with system text and tools.
        """
        before = self.render(history[:-1], generation=True, head=head)
        after = self.render((*history, *reply), generation=True, head=head)
        if not after.startswith(before):
            return None
        rest, lead, said = after[len(before) :], open_thinking(before), history[-1]
        stop = self.stop_of(said.content)
        raw, meant = said.content.removesuffix(stop), self.reply(said)
        for end in self._stop.finditer(rest):
            turn = lead + rest[: end.start()]
            same = turn.strip() == raw.strip() or self.read(turn).says(meant)
            if same and stop in ("", end.group()):
                return rest[end.start() if finish == "length" else end.end() :]
        return None

    def _forms(self, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
        """Yield the messages as the template takes them."""
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            if message.role != "assistant":
                yield self._heard(message)
                continue
            reply, results = self.reply(message), []
            while reply.calls and at < len(messages) and messages[at].role == "tool":
                results.append(messages[at])
                at += 1
            yield from self._exchange(reply, results) if reply.calls else [self._spoken(reply)]

    def _exchange(self, reply: Reply, results: Sequence[Message]) -> Iterator[dict[str, Any]]:
        """Yield an assistant's calls and their results."""
        if not self._writes_calls:
            text = "\n".join(filter(None, (reply.text, self.format.write(reply.calls))))
            yield self._spoken(replace(reply, text=text, calls=()))
            if results:
                yield {"role": "user", "content": "\n".join(_RESULT.format(result.content) for result in results)}
            return
        ids = {call.id: _shown_id(call.id, k) for k, call in enumerate(reply.calls)}
        shown = [replace(call, id=_shown_id(call.id, k)) for k, call in enumerate(reply.calls)]
        answers = [
            {"role": "tool", "content": m.content, "tool_call_id": ids.get(m.tool_call_id, _shown_id("", k))}
            for k, m in enumerate(results)
        ]
        if self._writes_several:
            yield self._spoken(replace(reply, calls=tuple(shown)))
            yield from answers
            return
        for k, call in enumerate(shown):
            yield self._spoken(replace(reply, calls=(call,)) if k == 0 else Reply(calls=(call,)))
            yield from answers[k:] if k == len(shown) - 1 else answers[k : k + 1]

    def _spoken(self, reply: Reply) -> dict[str, Any]:
        form: dict[str, Any] = {"role": "assistant", **self.format.form(reply)}
        if reply.calls:
            form["content"] = form["content"] or self._no_text
            form["tool_calls"] = [
                {
                    "type": "function",
                    "id": c.id,
                    "function": {"name": c.name, "arguments": self._arguments(c.arguments)},
                }
                for c in reply.calls
            ]
        return form

    def _heard(self, message: Message) -> dict[str, Any]:
        role = {"tool": self._error_role, "developer": self._developer_role}.get(message.role, message.role)
        wrapped = message.role == "tool" and not self._writes_calls
        return {"role": role, "content": _RESULT.format(message.content) if wrapped else message.content}

    def _find_stops(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
        """Return the token that ends a text, the tokenizer's own, and those of the format."""
        whole = self.render((_QUESTION, Message("assistant", _WORDS)), generation=False)
        shown, _, rest = whole.rpartition(_WORDS)
        if not shown:
            raise ValueError("the chat template does not show what the assistant says: use another model folder")
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.update(map(str, tokenizer.all_special_tokens))
        end = re.search("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)", rest)
        if end is None:
            raise ValueError(
                f"the chat template ends an assistant's turn with {rest!r}, which holds no special token: mark the "
                "token that ends a turn as special in tokenizer_config.json"
            )
        known = tokenizer.get_vocab()
        own = [str(tokenizer.eos_token)] if tokenizer.eos_token_id is not None else []
        return tuple(dict.fromkeys([end.group(), *own, *(stop for stop in self.format.stops if stop in known)]))

    def _show_tools(self, tools: list[dict[str, Any]]) -> None:
        """Make the prompt show every tool and every field: templates drop tools, references, or what lists hold."""
        hidden = self._hidden(tools)
        if hidden and not all(tool in hidden for tool in tools):
            self._tools = [_resolved(tool, tool["function"]["parameters"].get("$defs", {})) for tool in tools]
            hidden = self._hidden(self._tools)
        if not hidden:
            return
        listing = "\n".join(write_json(tool["function"]) for tool in hidden)
        text = f"JSON schemas of tools, one a line:\n{listing}"
        if len(hidden) == len(tools):
            example = self.format.write([ToolCall("NAME", {"ARGUMENT": "value"}, call_id(0))])
            text = f"{text}\nTo call one, write only:\n{example}"
        self._system = "\n\n".join(filter(None, (self._system, text)))

    def _hidden(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools of which the template does not show a name."""
        shown, hidden = self.render((_QUESTION,), generation=True), []
        self._tools, kept = None, self._tools
        bare = self.render((_QUESTION,), generation=True)
        self._tools = kept
        for tool in tools:
            names = {tool["function"]["name"], *_field_names(tool["function"])}
            if any(shown.count(name) <= bare.count(name) for name in names):
                hidden.append(tool)
        return hidden

    def _find_how_calls_are_written(self, tools: list[dict[str, Any]]) -> None:
        names = [tool["function"]["name"] for tool in (tools[0], tools[-1])]
        calls = tuple(ToolCall(name, {"id": f"L{k}"}, call_id(k)) for k, name in enumerate(names))
        for self._writes_several in (True, False):
            for self._arguments, self._no_text in product((dict, write_json), (None, "")):
                if self._expresses(calls):
                    return
        self._arguments, self._writes_calls, self._writes_several = dict, False, True
        written = self._written(calls[0])
        if (self._is_auto and calls[0].name in written) or not self._expresses(calls):
            raise self._unreadable(written, Reply(calls=calls[:1]))

    def _written(self, call: ToolCall) -> str:
        """Return what the template makes of a call, if anything."""
        messages = [{"role": "user", "content": _QUESTION.content}]
        for content in (None, ""):
            form = self._spoken(Reply(calls=(call,))) | {"content": content}
            try:
                return self._apply([*messages, form], chat_template=self.source, tokenize=False)
            except Exception:  # see `render`
                continue
        return ""

    def _reads(self, output: str, wanted: Reply) -> bool:
        """True if an output says what is wanted; a template may put an empty block of thinking before it."""
        said = self.read(output)
        return replace(said, thinking="").says(wanted) and not re.sub("</?think>", "", said.thinking).strip()

    def _unreadable(self, written: str, wanted: Reply) -> ValueError:
        what = f"a call of {wanted.calls[0].name}" if wanted.calls else f"the words {wanted.text[:60]!r}"
        return ValueError(
            f"the chat template writes {written[-200:]!r} for {what}, which the format {self.format.name} does not "
            "read back: name another one with prompt.tool_format, or use another model folder"
        )

    def _expresses(self, calls: tuple[ToolCall, ...]) -> bool:
        """True if two calls and their results show in a prompt, in order, and the calls can be read back."""
        results = [Message("tool", f"result{k}", tool_call_id=call.id) for k, call in enumerate(calls)]
        try:
            before = self.render((_QUESTION,), generation=True)
            whole = self.render((_QUESTION, _assistant(Reply(calls=calls)), *results), generation=True)
        except ValueError:
            return False
        turn, lead = _after(before, whole)
        end = self._stop.search(turn)
        said = Reply(calls=calls if self._writes_several else calls[:1])
        if end is None or not self._reads(lead + turn[: end.start()], said):
            return False
        places = [turn.find(result.content) for result in results]
        return -1 < places[0] < places[1]

    def _find_roles(self) -> None:
        """Find how the answer to an action that could not be parsed is shown, and a developer's message."""
        for role in ("tool", "user"):
            self._error_role = role if self._writes_calls else "user"
            if self._shows((_QUESTION, Message("assistant", _WORDS), Message("tool", "An error.", error=True))):
                break
        for role in ("developer", "system"):
            self._developer_role = role
            if self._shows((Message("developer", "A rule."), _QUESTION)):
                break

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            text = self.render(messages, generation=True, head=False)
        except ValueError:
            return False
        return all(message.content in text for message in messages)


def open_thinking(prompt: str) -> str:
    """Return the opening tag of thinking that a prompt ends with, with the blanks after it, or ""."""
    _, tag, blanks = prompt.rpartition(OPEN_THINKING)
    return "" if blanks.strip() else tag + blanks


def _after(before: str, whole: str) -> tuple[str, str]:
    """Return what stands after the generation prompt, and the thinking that the prompt has opened before it.

    A finished turn may lack that thinking; then its tag does not count as a part of the prompt.
    """
    if whole.startswith(before):
        return whole[len(before) :], open_thinking(before)
    before = before.removesuffix(open_thinking(before))
    return (whole[len(before) :] if whole.startswith(before) else ""), ""


def _shown_id(given: str, index: int) -> str:
    """Return a call's id in a form that every template takes: nine letters and digits."""
    if not given:
        return call_id(index)
    return given if len(given) == 9 and given.isalnum() else hashlib.sha256(given.encode()).hexdigest()[:9]


def _assistant(reply: Reply) -> Message:
    return Message("assistant", reply.text, tool_calls=reply.calls)


def _mapping(arguments: Any) -> dict[str, Any]:
    """Return arguments as a mapping, whether they are one or its JSON text."""
    return json.loads(arguments) if isinstance(arguments, str) else dict(arguments)


def _field_names(schema: Any) -> Iterator[str]:
    """Yield the names of all fields of a schema, at any depth."""
    for value in schema if isinstance(schema, list) else schema.values() if isinstance(schema, Mapping) else ():
        yield from _field_names(value)
    if isinstance(schema, Mapping) and isinstance(fields := schema.get("properties"), Mapping):
        yield from fields


def _resolved(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """Return a schema with what its references stand for in their place; one that holds itself stays a reference."""
    if isinstance(schema, list):
        return [_resolved(item, definitions, inside) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions and name not in inside:
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolved({**definitions[name], **others}, definitions, (*inside, name))
    return {key: _resolved(value, definitions, inside) for key, value in schema.items() if key != "$defs"}
