"""Threads that share an update share weights, and nothing that a forward pass or a failure writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from sinkflex.attention.huggingface import NAME
from sinkflex.config import LearnerConfig
from sinkflex.learner.losses import LossInputs
from sinkflex.learner.step import Learner, Needs, alias
from sinkflex.methods.grpo import GRPO
from tests.learner.test_plain_head import built
from tests.learner.test_step import gradient, some_rows
from tests.policy.tiny_policy import tiny_policy

SIZES: dict[str, Any] = dict(
    vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
)  # fmt: skip


def test_a_reference_that_is_first_run_by_several_cores_says_the_same() -> None:
    config = transformers.CohereConfig(**SIZES, logit_scale=0.5)
    found = []
    for cores in (1, 2, 4):  # each with a reference whose output layer nobody has looked at yet
        torch.manual_seed(1)
        needs = Needs(reference=built(config).eval())
        found.append(gradient(some_rows(16), 20, needs, cores=cores, kl_coefficient=0.5))
    assert all((shared - found[0]).norm() <= 1e-6 * found[0].norm() for shared in found[1:])


def test_what_a_forward_pass_writes_is_not_seen_by_another_core() -> None:
    factors = [1.0, 2.0, 3.0, 4.0]
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=factors, factor=4.0)
    lengths: dict[str, Any] = dict(original_max_position_embeddings=16, max_position_embeddings=64)
    config = transformers.Phi3Config(**SIZES, **lengths, rope_parameters=rope)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    other = alias(model)
    with torch.no_grad():
        model(input_ids=torch.arange(2, 10)[None])
        short = model.model.rotary_emb.inv_freq.clone()
        other(input_ids=torch.arange(2, 42)[None])
    assert torch.equal(model.model.rotary_emb.inv_freq, short)
    assert not torch.equal(other.model.rotary_emb.inv_freq, short)


def test_an_update_that_failed_leaves_nothing_to_the_next() -> None:
    method, said = GRPO({}, 64), []

    def failing(inputs: LossInputs) -> Any:
        if len(said) > 4:
            raise ZeroDivisionError
        said.append(inputs)
        return method.loss(inputs)

    norms = []
    for fails in (False, True):
        learner = Learner(copy.deepcopy(tiny_policy().model), LearnerConfig(micro_batch_tokens=20), 1, 1.0, 2)
        if fails:
            with pytest.raises(ZeroDivisionError):
                learner.update(some_rows(16), failing, Needs(), False)
            assert not any(model.training for model in learner.models)
        norms.append(learner.update(some_rows(16), method.loss, Needs(), False)["gradient_norm"])
    assert norms[0] == norms[1]
