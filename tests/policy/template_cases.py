"""Chat templates under test, each with a tokenizer of our own that has the special tokens of the real one.

`templates/*.jinja` are written by us from the documented formats. Where the environment variable SINKFLEX_TEMPLATES
names a folder, its Hugging Face tokenizer folders and its `*.jinja` files are tested too.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sinkflex.policy.chat import Chat

FOLDER = Path(__file__).parent / "templates"
REAL = Path(os.environ.get("SINKFLEX_TEMPLATES") or os.devnull)
# name: (begin, end, further special tokens; the format, where the template does not show it)
CASES: dict[str, tuple[str, str, str, str]] = {
    "qwen2_5": ("", "<|im_end|>", "<|im_start|> <|endoftext|>", "auto"),
    "qwen3": ("", "<|im_end|>", "<|im_start|> <|endoftext|>", "auto"),
    "qwen3_thinking": ("", "<|im_end|>", "<|im_start|> <|endoftext|>", "auto"),
    "qwen3_5": ("", "<|im_end|>", "<|im_start|> <|endoftext|>", "auto"),
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eom_id|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
        "auto",
    ),
    "harmony": (
        "<|startoftext|>",
        "<|return|>",
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|endoftext|>",
        "auto",
    ),
    "smollm2": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "hermes"),
    "mistral": (
        "<s>",
        "</s>",
        "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "auto",
    ),
    "mistral_args": (
        "<s>",
        "</s>",
        "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [ARGS] "
        "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
        "auto",
    ),
    "deepseek_v3_1": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜> <｜Assistant｜>",
        "auto",
    ),
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜> <｜Assistant｜>", "auto"),
}
# Tokens of their own that are no special tokens: decoding never drops them.
PLAIN = (  # noqa: SIM905
    "<think> </think> <tool_call> </tool_call> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁outputs▁begin｜> "
    "<｜tool▁outputs▁end｜>"
).split()
TEXTS = [
    'Please check the line, then say what you see.\n\nIt is on. {"line_id": "L1001", "deep": true}',
    '\n{"name": "get_line", "arguments": {"line_id": "L1"}}\n',
    "assistant\n\nuser\n\nThe line is dead.\n\n\n I see.",
] * 8
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_line",
            "description": "Look a line up.",
            "parameters": {
                "type": "object",
                "properties": {"line_id": {"type": "string"}, "deep": {"type": "boolean"}},
                "required": ["line_id"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book seats.",
            "parameters": {
                "type": "object",
                "properties": {
                    "passengers": {"type": "array", "items": {"$ref": "#/$defs/Passenger"}},
                    "cabins": {"type": "array", "items": {"type": "string"}},
                },
                "$defs": {
                    "Passenger": {
                        "type": "object",
                        "properties": {"surname": {"type": "string"}, "born": {"type": "string"}},
                    }
                },
            },
        },
    },
]


@cache
def alphabet() -> Tokenizer:
    """Return a byte-level tokenizer that merges across blanks and line breaks, so that boundaries matter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\n]*\n*"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def build(template: str, begin: str, end: str, special: list[str]) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a template and special tokens."""
    tokenizer = Tokenizer.from_str(alphabet().to_str())
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in filter(None, (begin, end, *special))]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin or None, eos_token=end)
    fast.chat_template = template
    return fast


def names() -> list[str]:
    """Return the names of all templates under test."""
    real = sorted(p.name for p in REAL.iterdir() if p.suffix == ".jinja" or p.is_dir()) if REAL.is_dir() else []
    return [*CASES, *real]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a name."""
    if name in CASES:
        begin, end, special, _ = CASES[name]
        return build((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), begin, end, special.split())
    if (REAL / name).is_dir():
        return AutoTokenizer.from_pretrained(REAL / name, local_files_only=True)
    template = (REAL / name).read_text(encoding="utf-8")
    tokens = set(re.findall(r"<[|｜][^|｜>\s'{]+[|｜]>|\[/?[A-Z_]+\]", template)) - set(PLAIN)
    ends = ("<|im_end|>", "<|return|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>")
    end = next((token for token in ends if token in template), "</s>")
    return build(template, "<s>", end, sorted({*tokens, "<|call|>"} - {end}))


@cache
def chat_of(name: str) -> Chat:
    """Return the conversations of a template, with a system text and tools."""
    form = CASES[name][3] if name in CASES else "auto"
    return Chat(tokenizer_of(name), "Be kind.", TOOLS, tool_format=form)
