"""How models write tool calls, a file for each format, and which one a tokenizer asks for."""

from __future__ import annotations

from collections.abc import Container

from sinkflex.policy.toolcalls.compact import COMPACT
from sinkflex.policy.toolcalls.deepseek import DEEPSEEK
from sinkflex.policy.toolcalls.harmony import HARMONY
from sinkflex.policy.toolcalls.hermes import HERMES
from sinkflex.policy.toolcalls.llama import LLAMA
from sinkflex.policy.toolcalls.mistral import MISTRAL
from sinkflex.policy.toolcalls.qwen_xml import QWEN_XML
from sinkflex.policy.toolcalls.reply import Format
from sinkflex.recipe import did_you_mean

# In the order in which a template is searched for their markers: the later ones' occur in templates of the earlier.
FORMATS = {f.name: f for f in (HARMONY, MISTRAL, DEEPSEEK, QWEN_XML, HERMES, LLAMA, COMPACT)}
AUTO = "auto"


def format_for(name: str, template: str, vocabulary: Container[str], needed: bool) -> Format:
    """Return the format of a name, or the one that a chat template or else a vocabulary shows.

    Args:
        name: of a format, or "auto".
        template: the chat template.
        vocabulary: the tokenizer's tokens.
        needed: there are tools to call.

    Raises:
        ValueError: there is no such format, or none is found where one is needed.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name != AUTO:
        near = did_you_mean(name, [AUTO, *FORMATS])
        raise ValueError(f"prompt.tool_format: there is no {name!r}.{near} Type {AUTO}, {', '.join(FORMATS)}")
    for place in (template, vocabulary):
        for found in FORMATS.values():
            if any(marker in place for marker in found.markers):
                return found
    if needed:
        raise ValueError(
            "the chat template writes no tool calls in a format that is known. If the model can call tools at all, "
            f"name how it writes calls: --set prompt.tool_format={HERMES.name} (or {', '.join(list(FORMATS))})"
        )
    return HERMES
