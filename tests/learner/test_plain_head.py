"""Only logits that are a plain product are formed by chunks; a bias that is still 0 or a far-off cap forbids it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers

from sinkflex.attention.huggingface import NAME
from sinkflex.learner.logprobs import node_logprobs, plain_head, sampled_nodes
from sinkflex.learner.packing import forest
from tests.learner.test_step import some_rows

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0,
)  # fmt: skip


def built(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)


def test_a_product_is_plain() -> None:
    assert plain_head(built(transformers.LlamaConfig(**SIZES)))
    assert plain_head(built(transformers.Gemma3TextConfig(**SIZES, tie_word_embeddings=True)))


@pytest.mark.parametrize(
    "config",
    [
        transformers.PhiConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),  # its bias starts as 0
        transformers.Gemma3TextConfig(**SIZES, final_logit_softcapping=30.0),  # far above the logits of random weights
        transformers.CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}, logit_scale=0.0625),
    ],
    ids=["zero bias", "cap", "scale"],
)
def test_a_bias_a_cap_and_a_scale_are_not(config: transformers.PreTrainedConfig) -> None:
    assert not plain_head(built(config))


def test_a_model_that_was_asked_about_can_be_freed() -> None:
    model = built(transformers.LlamaConfig(**SIZES))
    plain_head(model)
    assert not model.lm_head._forward_hooks
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_bias_that_starts_as_zero_is_trained() -> None:
    model = built(transformers.PhiConfig(**{**{k: v for k, v in SIZES.items() if k != "head_dim"}, "vocab_size": 300}))
    batch = forest(some_rows(2))
    node_logprobs(model, batch, sampled_nodes(batch), 1.0).logprobs.sum().backward()
    assert float(model.lm_head.bias.grad.abs().max()) > 0
    assert torch.isfinite(model.lm_head.bias.grad).all()
