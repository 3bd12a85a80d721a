"""A whole model step on `sink_plan` makes and keeps no tensor that grows with the square of the length."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from test_sink_attention import LargestTensor

from sinkflex.attention import aten, flex, varlen
from sinkflex.attention.plan import KEPT, Plan
from sinkflex.learner.checkpointing import checkpoint_layers
from sinkflex.learner.vocabulary import weighted_logprob
from sinkflex.policy import experts

TOKENS, WIDEST = 2048, 192  # numbers a token: gate and up projections of 2 experts; queries are 64, logits 97


def largest(model: torch.nn.Module, plan: Plan) -> tuple[int, int]:
    """Bytes of the largest storage that autograd keeps, and that any operator makes, forward and backward."""
    kept = [0]
    ids, positions = torch.arange(TOKENS)[None] % 97, torch.from_numpy(plan.position)[None]

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with LargestTensor() as made:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = model.model(input_ids=ids, position_ids=positions, plan=plan, use_cache=False).last_hidden_state[0]
            weights = torch.full((TOKENS,), 1 / TOKENS)
            loss = weighted_logprob(hidden, model.lm_head.weight, ids[0], weights)
        loss.backward()
    return max(kept), made.bytes


def model_on(attention: str) -> torch.nn.Module:
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=TOKENS, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, pad_token_id=0,
    )  # fmt: skip
    options = dict(attn_implementation=attention, experts_implementation=experts.NAME)
    return transformers.GptOssForCausalLM._from_config(config, **options).train()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("plan", [Plan.causal(TOKENS), Plan.from_lengths([700, 48, 1300])], ids=["one", "packed"])
def test_nothing_in_a_step_is_above_the_linear_bound(plan: Plan, checkpointed: bool) -> None:
    model = model_on("sink_plan")
    if checkpointed:
        checkpoint_layers(model)
    kept, made = largest(model, plan)
    assert kept <= TOKENS * WIDEST * 4
    assert made <= 2 * TOKENS * WIDEST * 4


def test_eager_is_above_it() -> None:
    kept, made = largest(model_on("eager"), Plan.causal(TOKENS))
    assert min(kept, made) >= TOKENS * TOKENS * 4 * 4


@pytest.mark.parametrize("backend", ["aten", "varlen", "flex"])
def test_layouts_of_plans_that_are_gone_are_not_kept(backend: str) -> None:
    layouts = {"aten": aten._calls, "varlen": varlen._calls, "flex": flex.block_mask}[backend]
    alive = []
    for tokens in range(20, 20 + 3 * KEPT):
        plan = Plan.causal(tokens)
        for window in (None, 8):
            layouts(plan, window, torch.device("cpu"))
        alive.append(weakref.ref(plan))
    del plan
    gc.collect()
    assert sum(plan() is not None for plan in alive) <= KEPT
