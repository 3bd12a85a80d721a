"""Sorted experts equal transformers' own, forward and backward, and keep a quarter of the bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers

from sinkflex.policy import experts

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts=5,
    num_experts_per_tok=2, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
FAMILIES = ["GptOss", "Qwen3Moe", "Mixtral"]  # biased and interleaved, plain, plain


def model(family: str, implementation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SIZES)
    built = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation=implementation
    )
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_eager(family: str) -> None:
    ids = torch.arange(60).view(2, 30)
    weight = torch.randn(2, 30, 97)
    gradients = []
    for implementation in (experts.NAME, "eager"):
        built = model(family, implementation)
        logits = built(input_ids=ids, use_cache=False).logits
        gradients.append([logits, *torch.autograd.grad((logits * weight).sum(), list(built.parameters()))])
    for mine, eager in zip(*gradients, strict=True):
        assert (mine - eager).norm() <= 1e-4 * eager.norm() + 1e-6


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    layer = model("GptOss", experts.NAME).model.layers[0].mlp.experts
    x = torch.randn(3, 32, requires_grad=True)
    out = layer(x, torch.tensor([[0, 1], [1, 3], [0, 3]]), torch.full((3, 2), 0.5))
    (gradient,) = torch.autograd.grad(out.sum(), layer.down_proj)
    assert [bool(part.any()) for part in gradient] == [True, True, False, True, False]


def test_frozen_experts_pass_the_gradient_on() -> None:
    layer = model("GptOss", experts.NAME).model.layers[0].mlp
    x = torch.randn(1, 20, 32, requires_grad=True)
    (trained,) = torch.autograd.grad(layer(x)[0].sum(), x)
    layer.experts.requires_grad_(False)
    (frozen,) = torch.autograd.grad(layer(x)[0].sum(), x)
    assert torch.equal(trained, frozen)


def saved_bytes(call: Callable[[], torch.Tensor], parameters: set[int]) -> int:
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return sum(size for pointer, size in saved.items() if pointer not in parameters)


def test_a_third_of_the_bytes_is_kept() -> None:
    found = {}
    for implementation in (experts.NAME, "eager", "grouped_mm"):
        layer = model("GptOss", implementation).model.layers[0].mlp
        parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        x = torch.randn(1, 200, 32, requires_grad=True)
        found[implementation] = saved_bytes(lambda layer=layer, x=x: layer(x)[0], parameters)
    assert found[experts.NAME] < min(found["eager"], found["grouped_mm"]) / 3


def test_experts_of_another_kind_are_refused() -> None:
    layer = model("GptOss", experts.NAME).model.layers[0].mlp.experts
    layer.has_gate = False
    with pytest.raises(ValueError, match="GptOssExperts has no gate"):
        layer(torch.randn(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2))
