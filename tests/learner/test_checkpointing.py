"""Checkpointed layers give the same gradients, save less, and never run attention twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from sinkflex.attention import aten, huggingface
from sinkflex.attention.plan import Plan
from sinkflex.learner.checkpointing import checkpoint_layers


@pytest.fixture
def model() -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return GptOssForCausalLM._from_config(config, attn_implementation=huggingface.NAME).train()


def loss(model: GptOssForCausalLM) -> torch.Tensor:
    plan = Plan.from_lengths([150, 50])
    ids = torch.arange(200)[None] % 97
    positions = torch.from_numpy(plan.position)[None]
    return model(input_ids=ids, position_ids=positions, plan=plan, use_cache=False).logits.square().mean()


def saved_bytes(call: Callable[[], torch.Tensor]) -> int:
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return sum(saved.values())


def test_gradients_are_the_same_and_attention_runs_once(
    model: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    forward = aten.forward
    monkeypatch.setattr(aten, "forward", lambda *arguments: runs.append(1) or forward(*arguments))
    plain = torch.autograd.grad(loss(model), list(model.parameters()))
    checkpoint_layers(model)
    runs.clear()
    value = loss(model)
    first = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(value, list(model.parameters()))
    assert len(runs) == model.config.num_hidden_layers
    for exact, mine, again in zip(plain, first, second, strict=True):
        assert torch.equal(exact, mine) and torch.equal(mine, again)


def test_less_is_saved(model: GptOssForCausalLM) -> None:
    plain = saved_bytes(lambda: loss(model))
    checkpoint_layers(model)
    assert saved_bytes(lambda: loss(model)) < plain / 3
