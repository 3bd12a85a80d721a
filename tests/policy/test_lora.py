"""LoRA: adapters on frozen weights, trained, saved, loaded and merged exactly."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sinkflex.config import Config, LearnerConfig, LoraConfig, ModelConfig
from sinkflex.learner.logprobs import row_logprobs
from sinkflex.learner.step import Learner, Needs, count
from sinkflex.methods.grpo import GRPO
from sinkflex.policy import lora
from sinkflex.policy.model import Policy, continued_policy, load_policy, new_policy
from tests.learner.test_step import some_rows
from tests.policy.tiny_policy import tiny_policy

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_policy().save(folder)
    return folder


def config(base: Path, rank: int = 4, **options: Any) -> Config:
    return Config(model=ModelConfig(path=str(base), lora=LoraConfig(rank=rank, **options)))


def adapted(base: Path, rank: int = 4, **options: Any) -> Policy:
    return new_policy(config(base, rank, **options), lambda: ())


def trained(base: Path, rank: int = 4) -> Policy:
    """A policy whose adapters are far from 0."""
    policy = adapted(base, rank)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.copy_(0.05 * torch.randn(p.shape, generator=rng))
    return policy


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS.to(model.device), use_cache=False).logits


def weighted(model: Any) -> Tensor:
    """A number that every weight has a part in."""
    scores = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
    return (scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores).sin()).sum()


def pairs(model: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, m) for name, m in model.named_modules() if hasattr(m, "lora_A"))


def test_a_new_adapter_changes_nothing_and_alone_is_trained(base: Path) -> None:
    policy = adapted(base)
    assert torch.equal(logits(policy.model), logits(load_policy(Config(), base).model))
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 4 and all("lora_" in name for name in names), "q, k, v and o of two layers"
    state = torch.random.get_rng_state()
    again = adapted(base)
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator is left as it was"
    first, second = (dict(p.model.named_parameters()) for p in (policy, again))
    assert all(torch.equal(first[name], second[name]) for name in names)


def test_the_gradient_is_that_of_all_weights_projected_on_the_adapters(base: Path) -> None:
    """With W' = W + s B A and G the gradient of W': that of B is s G A^T, that of A is s B^T G. In float64."""
    model = trained(base).model.double()
    whole = lora.merge(copy.deepcopy(model))
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-10, atol=1e-10)
    weighted(model).backward()
    weighted(whole).backward()
    modules, count = dict(whole.named_modules()), 0
    for name, layer in pairs(model):
        full: Any = modules[name].weight.grad
        down, up, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
        torch.testing.assert_close(up.grad, scale * full @ down.T, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(down.grad, scale * up.T @ full, rtol=1e-9, atol=1e-12)
        count += 1
    assert count == 8
    assert all(p.grad is None for name, p in model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_learner_trains_adapters_as_the_projected_gradient_says(base: Path, checkpointed: bool) -> None:
    policy, rows = trained(base), some_rows()
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    whole = lora.merge(copy.deepcopy(policy.model))
    for model in (policy.model, whole):
        options = LearnerConfig(clip_norm=1e9, checkpoint_layers=checkpointed and model is policy.model)
        Learner(model, options, 1, 1.0).accumulate(rows, GRPO({}, 64).loss, Needs(), count(rows, True))
    modules = dict(whole.named_modules())
    for name, layer in pairs(policy.model):
        full: Any = modules[name].weight.grad
        down = layer.lora_A["default"].weight
        found = layer.lora_B["default"].weight.grad
        assert (found - layer.scaling["default"] * full @ down.T).norm() < 1e-5 * found.norm()
    assert all(torch.equal(p, frozen[name]) for name, p in policy.model.named_parameters() if name in frozen)


def test_an_adapter_is_saved_in_pefts_format_and_loads_to_the_bit(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy = trained(base)
    policy.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "model.safetensors").exists()
    ours = load_policy(Config(), tmp_path)
    assert torch.equal(logits(ours.model), logits(policy.model))
    assert ours.tokenizer.chat_template == policy.tokenizer.chat_template
    saved = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    loaded = dict(ours.model.named_parameters())
    assert saved and all(torch.equal(loaded[name], p) and loaded[name].requires_grad for name, p in saved.items())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(logits(theirs), logits(policy.model), rtol=1e-4, atol=1e-4)
    again = tmp_path / "again"
    ours.save(again)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_merged_model_is_an_ordinary_folder(base: Path, tmp_path: Path) -> None:
    policy = trained(base)
    before = logits(policy.model)
    Policy(lora.merge(policy.model), policy.tokenizer).save(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    merged = load_policy(Config(), tmp_path)
    assert lora.rank_of(merged.model) == 0
    torch.testing.assert_close(logits(merged.model), before, rtol=1e-4, atol=1e-4)


def test_a_reference_stands_on_the_same_weights_and_does_not_move(base: Path, tmp_path: Path) -> None:
    policy, rows = adapted(base), some_rows()
    policy.save(tmp_path)
    reference = lora.twin(policy.model, tmp_path)
    assert reference is not None and not any(p.requires_grad for p in reference.parameters())
    own = {p.data_ptr() for p in policy.model.parameters() if not p.requires_grad}
    new = [p.numel() for p in reference.parameters() if p.data_ptr() not in own]
    assert sum(new) == sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    untouched = logits(load_policy(Config(), base).model)
    learner = Learner(policy.model, LearnerConfig(learning_rate=1e-2), 2, 1.0)
    for _ in range(2):
        learner.update(rows, GRPO({"kl_coefficient": 0.5}, 64).loss, Needs(reference=reference), True)
    assert torch.equal(logits(reference), untouched), "the switched-off adapter, which is the base"
    assert not torch.equal(logits(policy.model), untouched)
    gap = [a - b for a, b in zip(*(row_logprobs(m, rows, 1.0, 10_000) for m in (policy.model, reference)), strict=True)]
    assert max(np.abs(x).max() for x in gap) > 1e-3
    assert lora.twin(tiny_policy().model, tmp_path) is None
    trained(base, rank=2).save(tmp_path / "other")
    assert lora.twin(policy.model, tmp_path / "other") is None, "of another shape: it is loaded apart"


def test_mistakes_say_what_to_type(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'q_prj' is no inner linear layer\. Did you mean q_proj\?"):
        adapted(base, targets=("q_prj",))
    with pytest.raises(ValueError, match=r"'lm_head' is no inner linear layer"):
        adapted(base, targets=("lm_head",))
    with pytest.raises(ValueError, match=r"a tiny model has none\. Type model\.path = FOLDER or model\.lora\.rank = 0"):
        Config(model=ModelConfig(lora=LoraConfig(rank=4)))
    trained(base, rank=2).save(tmp_path)
    with pytest.raises(ValueError, match=r"lora\.rank is 4, but .* an adapter of rank 2\. Type model\.lora\.rank = 2"):
        new_policy(config(tmp_path, 4), lambda: ())
    with pytest.raises(ValueError, match=r"lora\.rank is 4, but .* holds whole weights\. Type model\.lora\.rank = 0"):
        continued_policy(config(base, 4), base)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": "gone"}))
    with pytest.raises(ValueError, match=r"an adapter of gone, which is no Hugging Face folder on this machine"):
        load_policy(Config(), tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r'peft, which is not installed\. Type: pip install "sinkflex\[lora\]"'):
        adapted(base)


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    adapted(base, targets=("q_proj",)).save(tmp_path)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "target_modules": ["k_proj"]}))
    with pytest.raises(ValueError, match=r"is not one of this model: .*k_proj"):
        load_policy(Config(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "target_modules": ["lm_head"]}))
    with pytest.raises(ValueError, match=r"changes the output layer too"):
        load_policy(Config(), tmp_path)
    for odd, named in (({"modules_to_save": ["norm"]}, "modules_to_save"), ({"bias": "all"}, "biases")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**about, **odd}))
        with pytest.raises(ValueError, match=rf"an adapter with {named}, expected matrices of LoRA alone"):
            load_policy(Config(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        load_policy(Config(), tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Qwen3Moe", "OPT"])
def test_models_of_other_families_take_adapters(family: str, tmp_path: Path) -> None:
    tokenizer = tiny_policy().tokenizer
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(tokenizer))
    if family == "OPT":
        sizes |= dict(ffn_dim=48, word_embed_proj_dim=32)
    else:
        sizes |= dict(intermediate_size=48, num_key_value_heads=2, head_dim=8)
    if family == "Qwen3Moe":
        sizes |= dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))
    Policy(model, tokenizer).save(tmp_path / "base")
    policy = trained(tmp_path / "base")
    assert not torch.equal(logits(policy.model), logits(load_policy(Config(), tmp_path / "base").model))
    policy.save(tmp_path / "adapter")
    loaded = load_policy(Config(), tmp_path / "adapter").model
    assert torch.equal(logits(loaded), logits(policy.model))
    merged = lora.merge(policy.model)
    torch.testing.assert_close(logits(merged), logits(loaded), rtol=1e-4, atol=1e-4)
