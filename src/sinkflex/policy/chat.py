"""From messages to token ids and back: the only path text takes into the model.

Sampled ids are kept verbatim and never rendered again. What follows them (the environment's reply and the next
generation prompt) is what the chat template writes after that turn, so the ids equal a one-shot rendering. Where the
template rewrites what stands before, or shows the turn as something else than was sampled, the turn forks: it gets a
whole new prompt, and the trajectory becomes several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from sinkflex.envs.env import Action, Message
from sinkflex.policy.template import Template, open_thinking

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
_PROMPT_END = 8  # ids that hold what a generation prompt ends with


class Chat:
    """Ids of one kind of conversation: a tokenizer with its chat template, a system text and tool schemas.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        system: the system text ("" for none).
        tools: tool schemas in OpenAI form, passed to the template.
        window: exchanges (an action and its reply) a prompt keeps besides the opening; 0 keeps all.
        tool_format: how the model writes calls: a name of `policy/toolcalls`, or "auto" to see it from the template.

    Attributes:
        stop_ids: ids that end a turn.

    Raises:
        ValueError: no template, no token that ends a turn, or actions in the template's form cannot be read back.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str,
        tools: Sequence[dict[str, Any]],
        window: int = 0,
        tool_format: str = "auto",
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: use an instruction-tuned model folder")
        self.tokenizer = tokenizer
        self.window = window
        self.template = Template(tokenizer, system, tools, tool_format)
        self.stop_ids = tuple(self._encode(stop)[0] for stop in self.template.stops)
        self._extensions: dict[tuple[Any, ...], list[int]] = {}
        # Siblings begin alike.
        self._openings = lru_cache(maxsize=256)(lambda m: self._encode(self.template.render(m, generation=True)))
        self._append_only = APPEND_ONLY in self.template.source
        if self._append_only:
            for k in (1, 3, 5):
                whole = self.template.tail(_PROBE[: k + 1], (_PROBE[k + 1],), "stop")
                short = self.template.tail(_PROBE[:2], (_PROBE[k + 1],), "stop", head=False)
                if whole != short:
                    raise ValueError(
                        f"the chat template says {APPEND_ONLY}, but what it adds depends on what was before"
                    )

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the whole prompt up to and including the generation prompt."""
        if any(message.tool_calls for message in messages):  # their arguments have no hash
            return self._encode(self.template.render(messages, generation=True))
        return list(self._openings(tuple(messages)))

    def extend(self, history: Sequence[Message], reply: tuple[Message, ...], finish: str) -> tuple[list[int], bool]:
        """Return the ids that follow the last sampled id, and whether they are a whole new prompt (a fork).

        Args:
            history: the conversation, ending with the assistant message just sampled.
            reply: the environment's messages.
            finish: "stop" if a stop token was sampled, "length" if the turn was cut (the template closes it).
        """
        stop = (self.template.stop_of(history[-1].content) or self.template.stops[0]) if finish == "stop" else ""
        if self._append_only:
            key = (reply, finish)
            if key not in self._extensions:
                if len(self._extensions) >= 4096:
                    self._extensions.clear()
                text = self.template.tail(_PROBE[:2], reply, finish, head=False)
                assert text is not None
                self._extensions[key] = self._encode_after(stop, text)
            return self._extensions[key], False
        text = self.template.tail(history, reply, finish)
        if text is None:
            return self.start((*history, *reply)), True
        return self._encode_after(stop, text), False

    def after_task(self, prompt: Sequence[int], text: str) -> tuple[int, list[int]]:
        """Return where the last message of a first prompt ends, and the ids of a text that is to stand there.

        Args:
            prompt: what `start` returned for messages that do not end with the assistant's.
            text: goes to the end of the last message's content.

        Raises:
            ValueError: the prompt ends as no prompt of this template does.
        """
        for role in ("user", "tool", "system"):
            rendered = self.template.render((Message(role, _PROBE[0].content),), generation=True)
            end = self._encode(rendered.rpartition(_PROBE[0].content)[2])
            if end and list(prompt[-len(end) :]) == end:
                return len(prompt) - len(end), self._encode(text)
        raise ValueError("the prompt does not end with a message of this template; expected what `start` returned")

    def parse(self, action_ids: Sequence[int], finish: str, prompt_ids: Sequence[int] = ()) -> Action:
        """Parse sampled ids (a final stop token included) into an action; a cut-off turn is a parse error.

        Args:
            action_ids: as sampled.
            finish: "stop" or "length".
            prompt_ids: what they were sampled after; its end may have opened the thinking.
        """
        lead = open_thinking(self._decode(prompt_ids[-_PROMPT_END:]))
        if finish == "length":
            error = "the message was cut off: it is longer than one turn allows"
            return Action(error=error, raw=lead + self._decode(action_ids))
        output = lead + self._decode(action_ids[:-1])
        return self.template.read(output).action(output + self._decode(action_ids[-1:]))

    def action_ids(self, action: Action) -> list[int]:
        """Return the ids an assistant would sample to do this action, stop token included (for demonstrations)."""
        return self._encode_after(
            self.template.render(_PROBE[:1], generation=True, head=False), self.template.turn(action)
        )

    def _encode_after(self, before: str, text: str) -> list[int]:
        """Return the ids of a text after another one: some tokenizers treat the beginning of a text otherwise."""
        head, whole = self._encode(before), self._encode(before + text)
        return whole[len(head) :] if whole[: len(head)] == head else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def assistant_message(action: Action) -> Message:
    """Return the assistant message that stands for an action in the conversation: as sampled, if it was."""
    return Message("assistant", action.raw or action.text or action.error or "", tool_calls=action.tool_calls)
