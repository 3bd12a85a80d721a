"""Unedited Hugging Face models on `sink_plan` equal themselves on eager; sinks that do nothing are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from attention_cases import answers

from sinkflex.attention import huggingface
from sinkflex.attention.plan import Plan

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
CONFIGS = {
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "Qwen3": dict(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "Llama": {},
    "Gemma3": dict(sliding_window=16),
}


def pair(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same random model on sink_plan and on eager."""
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, family + "Config")
    config = getattr(transformers, name)(**SIZES, **CONFIGS[family])
    torch.manual_seed(0)
    models = []
    for implementation in (huggingface.NAME, "eager"):
        build = transformers.AutoModelForCausalLM.from_config
        models.append(build(copy.deepcopy(config), attn_implementation=implementation))
    for name, parameter in models[0].named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.2)
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


def gradients(model: torch.nn.Module, logits: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(parameters, torch.autograd.grad((logits * weight).sum(), parameters.values()), strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_padded_batch_equals_eager(family: str) -> None:
    mine, eager = pair(family)
    ids = torch.randint(1, 97, (3, 60))
    mask = torch.ones_like(ids)
    mask[0, :23], mask[1, 40:] = 0, 0
    weight = torch.randn(3, 60, 97) * mask[..., None]
    logits = [model(input_ids=ids, attention_mask=mask, use_cache=False).logits for model in (mine, eager)]
    torch.testing.assert_close(logits[0][mask > 0], logits[1][mask > 0], rtol=1e-4, atol=1e-4)
    found, true = (gradients(model, x, weight) for model, x in zip((mine, eager), logits, strict=True))
    for name in true:
        assert (found[name] - true[name]).norm() <= 1e-4 * true[name].norm() + 1e-6, name


@pytest.mark.parametrize("told", ["plan", "position_ids"])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_equal_the_documents_alone(family: str, told: str) -> None:
    mine, eager = pair(family)
    plan = Plan.from_lengths([40, 1, 25])
    ids = torch.randint(1, 97, (1, 66))
    extra = {"plan": plan} if told == "plan" else {}
    positions = torch.from_numpy(plan.position)[None]
    packed = mine(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
    alone = torch.cat([eager(input_ids=part, use_cache=False).logits for part in ids.split([40, 1, 25], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_answers_that_share_a_prompt_equal_repeated_rows(family: str) -> None:
    mine, eager = pair(family)
    plan = answers(30, [20, 25])
    ids = torch.randint(1, 97, (1, 75))
    shared = mine(input_ids=ids, position_ids=torch.from_numpy(plan.position)[None], plan=plan, use_cache=False).logits
    first = eager(input_ids=ids[:, :50], use_cache=False).logits
    second = eager(input_ids=torch.cat([ids[:, :30], ids[:, 50:]], 1), use_cache=False).logits
    torch.testing.assert_close(shared, torch.cat([first, second[:, 30:]], 1), rtol=1e-4, atol=1e-4)


def test_live_sinks_are_counted_and_dead_ones_refused() -> None:
    mine, eager = pair("GptOss")
    before = copy.deepcopy(mine.state_dict())
    assert huggingface.require_live_sinks(mine) == huggingface.require_live_sinks(eager) == 4
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    assert huggingface.require_live_sinks(pair("Llama")[0]) == 0

    def drops_sinks(*arguments: object, s_aux: object = None, **options: object) -> object:
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(*arguments, **options)

    transformers.AttentionInterface.register("drops_sinks", drops_sinks)
    mine.config._attn_implementation = "drops_sinks"
    with pytest.raises(ValueError, match=r"sinks of model\.layers\.0\.self_attn change no logit"):
        huggingface.require_live_sinks(mine)


def test_a_layer_that_does_not_pass_its_sinks_is_refused() -> None:
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.zeros(4))
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="owns sinks but did not pass them"):
        huggingface.plan_attention(module, q, k, k, None)
    with pytest.raises(ValueError, match="softcap=30"):
        huggingface.plan_attention(module, q, k, k, None, s_aux=module.sinks, softcap=30.0)


TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)


def on_plan(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=huggingface.NAME)


@pytest.mark.parametrize("family", CONFIGS)
def test_models_that_keep_packed_documents_apart_pass(family: str) -> None:
    huggingface.require_isolation(pair(family)[0])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            transformers.Qwen3NextConfig(
                **TINY, num_hidden_layers=2, head_dim=8, layer_types=["linear_attention", "full_attention"],
                linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            ),
            "linear_attention",
        ),
        (
            transformers.Lfm2Config(**TINY, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "conv",
        ),
    ],
    ids=["Qwen3-Next", "LFM2"],
)  # fmt: skip
def test_layers_that_carry_state_across_documents_are_refused(
    config: transformers.PreTrainedConfig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = on_plan(config), Plan.from_lengths([5, 4])
    with pytest.raises(ValueError, match=f"has layers of type {kind}, which carry"):
        huggingface.require_isolation(model)
    with pytest.raises(ValueError, match=f"has layers of type {kind}, which carry"):
        positions = torch.from_numpy(plan.position)[None]
        model(input_ids=torch.arange(9)[None], position_ids=positions, plan=plan, use_cache=False)
    assert model(input_ids=torch.arange(9)[None], use_cache=False).logits.isfinite().all()  # one document may
    monkeypatch.setattr(huggingface, "LAYERS", ("conv", "linear_attention", *huggingface.LAYERS))
    with pytest.raises(ValueError, match="packed documents otherwise than each alone"):  # also if nobody names the kind
        huggingface.require_isolation(model)


def test_masks_that_a_plan_does_not_describe_are_refused() -> None:
    ids = torch.arange(9)[None]
    chunked = transformers.Llama4TextConfig(
        **TINY, num_hidden_layers=2, head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=4
    )
    with pytest.raises(ValueError, match="Llama4TextConfig has a mask in chunks"):
        on_plan(chunked)(input_ids=ids, use_cache=False)
    both_ways = transformers.LlamaConfig(**TINY, num_hidden_layers=1, is_causal=False)
    with pytest.raises(ValueError, match="that sees later tokens"):
        on_plan(both_ways)(input_ids=ids, use_cache=False)
