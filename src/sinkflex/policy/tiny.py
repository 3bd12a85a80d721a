"""A tiny gpt-oss-shaped policy built from nothing: a tokenizer trained on the domain's texts and a random model.

It has the parts that make gpt-oss special (learned sinks, alternating windows, grouped queries, a mixture of experts)
at about one million parameters, so that the whole loop runs on a laptop without a download.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

from sinkflex.config import TinyConfig
from sinkflex.policy.chat import APPEND_ONLY

LONG = 2048  # tokens; contexts above are searched from the start
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")

CHAT_TEMPLATE = (
    APPEND_ONLY
    + """\
{%- if tools or messages[0].role == 'system' -%}
<|system|>{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}
{%- for tool in tools or [] -%}
{{ ' ' if not loop.first }}{{ tool.function.name }}
{%- for name in tool.function.parameters.properties or {} %}{{ ' ' if loop.first else ',' }}{{ name }}{%- endfor -%};
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
<|call|>{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor -%}
{%- else -%}{{ message.content }}{%- endif -%}
<|end|>
{%- elif message.role != 'system' -%}
<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
)


# What a token may not cross: a JSON string without blanks and the punctuation after it, a word, or other signs.
WORDS = r' ?"[^"\s]*"[:,\]}]*| ?\w+| ?[^\w\s"]+|"|\s+'
# For more numbers than ids can stand for: the parts of an id ("yusuf_rossi_9620", "#W2378156") and of a name ("Yusuf")
# have the same tokens in words and in quotes, so that an id never seen before can be copied.
IDS = (
    r' ?"[a-z_]+\d?":| ?"[^"\s\dA-Z]*"[:,\]}]*|[a-z]+[._]?(?=[a-z._]*\d)|[A-Z]+[a-z]*| ?[a-z_]++(?![a-z._]*\d)'
    r'|\d{1,2}| ?[^\w\s"]+| ?"[:,\]}]*|\s+|.'
)


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with our chat template on the given texts.

    Args:
        texts: what the policy will read and write.
        vocabulary: number of ids, special tokens and the 256 bytes included.
    """
    texts = list(texts)
    numbers = Counter(number for text in texts for number in dict.fromkeys(re.findall(r"\d{4,}", text)))
    many = len(numbers) > vocabulary / 2
    often = [number for number, seen in numbers.most_common(vocabulary // 6) if seen >= 20 and len(number) > 5]
    common = often if many else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(IDS if many else WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(common),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(number, single_word=True, normalized=False) for number in common])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[2:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(config: TinyConfig, vocabulary: int, seed: int) -> GptOssForCausalLM:
    """Return a randomly initialized gpt-oss-shaped model in float32.

    Args:
        config: sizes.
        vocabulary: number of ids of the tokenizer.
        seed: seed of the initialization; the global torch generator is left as it was.
    """
    shape = GptOssConfig(
        vocab_size=vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        sliding_window=config.window,
        layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(config.layers)],
        max_position_embeddings=config.max_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        router_aux_loss_coef=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GptOssForCausalLM(shape)
    if config.max_tokens > LONG:
        match_equal_tokens(model)
    return model


@torch.no_grad()
def match_equal_tokens(model: GptOssForCausalLM) -> None:
    """Let every full layer begin by looking at equal tokens: its queries are its keys, a little larger.

    Otherwise attention begins as an even mean over the context, and the longer that is, the longer it takes until
    anything is found in it. After mimetic initialization (arXiv 2305.09828): query times key is near the identity.
    """
    size = model.config.head_dim
    layers: Any = model.model.layers
    for layer, kind in zip(layers, model.config.layer_types or (), strict=True):
        if kind == "full_attention":
            keys = layer.self_attn.k_proj.weight.unflatten(0, (-1, size))
            queries = layer.self_attn.q_proj.weight.unflatten(0, (len(keys), -1, size))
            queries.copy_(1.5 * keys[:, None].expand_as(queries))
