"""What a loaded model is changed to: no dropout in any form, all embeddings learned, nothing that leaks when packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from sinkflex.config import Config
from sinkflex.policy.model import Policy, load_policy
from tests.policy.tiny_policy import tiny_policy


def loaded(config: transformers.PreTrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    Policy(model, tiny_policy().tokenizer).save(folder)
    return load_policy(Config(), folder).model


def test_dropout_kept_as_plain_numbers_is_off(tmp_path: Path) -> None:
    sizes = dict(vocab_size=400, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    rates = dict(dropout=0.5, attention_dropout=0.5, layerdrop=0.5, word_embed_proj_dim=32, max_position_embeddings=64)
    model = loaded(transformers.OPTConfig(**sizes, **rates), tmp_path).train()
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)


def test_the_end_of_a_turn_is_learned_though_it_is_the_padding_too(tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    config = transformers.LlamaConfig(**sizes, vocab_size=400, pad_token_id=1, eos_token_id=1)
    model = loaded(config, tmp_path)
    ids = torch.tensor([[5, 1, 6, 7]])
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert float(model.model.embed_tokens.weight.grad[1].abs().max()) > 0


def test_a_model_that_leaks_between_packed_rows_is_refused(tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=400)
    config = transformers.Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match=r"has layers of type conv, which carry"):
        loaded(config, tmp_path)
