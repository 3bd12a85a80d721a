"""From messages to token ids and back: the only path text takes into the model.

Sampled ids are kept verbatim and never re-rendered. What follows them (the environment's reply and the next generation
prompt) is the difference between two renderings of the chat template, so the ids equal a one-shot rendering. Where a
template rewrites history (the earlier rendering is no prefix of the later one) the turn forks: it gets a whole new
prompt, and the trajectory becomes several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.policy.toolcalls import parser_for

# A template that holds this comment promises that what a reply adds depends on the reply alone. A short stand-in for
# the history then gives the same text, at a cost that does not grow with the conversation.
APPEND_ONLY = "{#- append-only -#}"

_PROBE = (
    Message("user", "A first question."),
    Message("assistant", "Some text."),
    Message("user", "More."),
    Message("assistant", "Other text."),
    Message("user", "And more."),
    Message("assistant", "Last text."),
    Message("user", "Thanks."),
)


class Chat:
    """Renders one conversation format: a tokenizer with its chat template, a system text and tool schemas.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template and an end-of-turn token (`eos_token`).
        system: the system text ("" for none).
        tools: tool schemas in OpenAI form, passed to the template.
        window: exchanges (an action and its reply) a prompt keeps besides the opening; 0 keeps all.

    Raises:
        ValueError: no template or end-of-turn token, or actions in the template's form cannot be read back.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system: str, tools: Sequence[dict[str, Any]], window: int = 0
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: use an instruction-tuned model folder")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token: name the token that ends a turn in tokenizer_config.json")
        self.tokenizer = tokenizer
        self.window = window
        self.stop_ids = (int(tokenizer.eos_token_id),)
        self._stop = str(tokenizer.eos_token)
        self._system = system
        self._tools = list(tools) or None
        self._parse = parser_for(str(tokenizer.chat_template))
        self._extensions: dict[tuple[Any, ...], list[int]] = {}
        self._append_only = APPEND_ONLY in str(tokenizer.chat_template)
        self._require_readable_actions()
        if self._append_only:
            for k in (1, 3, 5):
                whole = self._difference(_PROBE[: k + 1], (_PROBE[k + 1],), "stop")
                short = self._difference(_PROBE[:2], (_PROBE[k + 1],), "stop", head=False)
                if whole != short:
                    raise ValueError(
                        f"the chat template says {APPEND_ONLY}, but what it adds depends on what was before"
                    )

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the whole prompt up to and including the generation prompt."""
        return self._encode(self._render(messages, generation=True))

    def extend(self, history: Sequence[Message], reply: tuple[Message, ...], finish: str) -> tuple[list[int], bool]:
        """Return the ids that follow the last sampled id, and whether they are a whole new prompt (a fork).

        Args:
            history: the conversation, ending with the assistant message just sampled.
            reply: the environment's messages.
            finish: "stop" if the stop token was sampled, "length" if the turn was cut (the template closes it).
        """
        if self._append_only:
            key = (reply, finish)
            if key not in self._extensions:
                if len(self._extensions) > 50_000:
                    self._extensions.clear()
                text = self._difference(_PROBE[:2], reply, finish, head=False)
                assert text is not None
                self._extensions[key] = self._encode(text)
            return self._extensions[key], False
        text = self._difference(history, reply, finish)
        if text is None:
            return self.start((*history, *reply)), True
        return self._encode(text), False

    def parse(self, action_ids: Sequence[int], finish: str) -> Action:
        """Parse sampled ids (a final stop token included) into an action; a cut-off turn is a parse error."""
        ids = action_ids[:-1] if finish == "stop" else action_ids
        if finish == "length":
            return Action(error="the message was cut off: it is longer than one turn allows")
        return self._parse(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def action_ids(self, action: Action) -> list[int]:
        """Return the ids an assistant would sample to do this action, stop token included (for demonstrations)."""
        before = self._render(_PROBE[:1], generation=True, head=False)
        after = self._render((*_PROBE[:1], assistant_message(action)), generation=False, head=False)
        assert after.startswith(before), "the template's generation prompt is no prefix of an assistant turn"
        turn, stop, _ = after[len(before) :].rpartition(self._stop)
        if not stop:
            raise ValueError(
                f"the chat template ends no assistant turn with the tokenizer's eos_token {self._stop}, but writes "
                f"{after[len(before) :]!r}: set eos_token in tokenizer_config.json to the token that ends a turn"
            )
        return self._encode(turn + stop)

    def _require_readable_actions(self) -> None:
        """Refuse a template whose assistant turns do not stop, or whose calls would be taken for words to the user."""
        text = Action(text="Some text.")
        if not str(self.parse(self.action_ids(text), "stop").text).endswith(str(text.text)):
            raise ValueError("the chat template changes what the assistant says: use another model folder")
        for tool in (self._tools or [])[:1]:
            call = Action(tool_calls=(ToolCall(tool["function"]["name"], {"id": "1"}, "call00000"),))
            ids = self.action_ids(call)
            if [(c.name, c.arguments) for c in self.parse(ids, "stop").tool_calls] != [
                (c.name, c.arguments) for c in call.tool_calls
            ]:
                raise ValueError(
                    f"the chat template writes a tool call as {self.tokenizer.decode(ids)!r}, which no parser reads: "
                    "use a model that writes <tool_call>{...}</tool_call>, as Qwen does"
                )

    def _difference(
        self, history: Sequence[Message], reply: tuple[Message, ...], finish: str, head: bool = True
    ) -> str | None:
        before = self._render(history, generation=False, head=head)
        after = self._render((*history, *reply), generation=True, head=head)
        if not after.startswith(before):
            return None
        closing = before[before.rindex(self._stop) :]
        if finish == "stop":
            closing = closing[len(self._stop) :]
        return closing + after[len(before) :]

    def _render(self, messages: Sequence[Message], generation: bool, head: bool = True) -> str:
        system = self._system if head else ""
        if messages and messages[0].role == "system":  # a method's text, in a fixed place after the system text
            system, messages = "\n\n".join(filter(None, (system, messages[0].content))), messages[1:]
        try:
            text = self.tokenizer.apply_chat_template(
                ([{"role": "system", "content": system}] if system else []) + [_template_form(m) for m in messages],
                tools=self._tools if head else None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def assistant_message(action: Action) -> Message:
    """Return the assistant message that stands for an action in the conversation."""
    return Message("assistant", action.text or action.error or "", tool_calls=action.tool_calls)


def _template_form(message: Message) -> dict[str, Any]:
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        form["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.role == "tool" and message.tool_call_id:
        form["tool_call_id"] = message.tool_call_id
    return form
