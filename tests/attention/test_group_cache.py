"""Decoding on a cache equals training attention on the tree of the same tokens, and generates what eager generates."""

from __future__ import annotations

import pytest
import torch
from attention_cases import answers
from test_plan_attention_models import pair

from sinkflex.attention import cache as cache_module
from sinkflex.attention.cache import GroupCache, cached_attention
from sinkflex.attention.plan import Plan
from sinkflex.attention.sink import sink_attention

HEADS, KV_HEADS, SIZE = 4, 2, 16


def draw(members: int, tokens: int) -> list[torch.Tensor]:
    return [torch.randn(members, heads, tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]


UNEVEN = [(3, [3, 1, 2]), (12, [0, 12, 7]), *[(1, [1, 1, 1])] * 9, (1, [1, 0, 1]), (2, [2, 1, 0])]
EVEN = [*[(1, [1, 1, 1])] * 12, (7, [7, 7, 7]), *[(1, [1, 1, 1])] * 5]


@pytest.mark.parametrize("steps", [UNEVEN, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("window", [None, 1, 8, 64])
@pytest.mark.parametrize("prompt", [5, 40])
def test_a_group_that_grows_equals_the_tree(
    prompt: int, window: int | None, steps: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uneven: tool results of different length, then single tokens of which some members get none.
    monkeypatch.setattr(cache_module, "SCORES", 4000)  # several chunks of new tokens
    sinks = torch.randn(HEADS)
    cache = GroupCache([None, window], 3, KV_HEADS, SIZE, capacity=40)
    shared = draw(1, prompt)
    own: list[list[torch.Tensor]] = [[] for _ in range(3)]  # per member: q, k, v of each real token
    outs: list[list[torch.Tensor]] = [[] for _ in range(3)]
    first = cache.prefill(1, *shared, sinks)
    for tokens, counts in steps:
        new = draw(3, tokens)
        cache.begin(tokens, counts)
        out = cache.extend(1, *new, sinks)
        cache.advance()
        for member, count in enumerate(counts):
            own[member].append(torch.cat([x[member : member + 1, :, :count] for x in new], 1))
            outs[member].append(out[member : member + 1, :, :count])
    assert cache.lengths.tolist() == [sum(counts[m] for _, counts in steps) for m in range(3)]
    tokens = torch.cat([torch.cat(shared, 1), *(x for member in own for x in member)], 2)
    plan = answers(prompt, cache.lengths.tolist())
    tree = sink_attention(*tokens.split([HEADS, KV_HEADS, KV_HEADS], 1), plan, sinks, window=window)
    found = torch.cat([first, *(x for member in outs for x in member)], 2)
    torch.testing.assert_close(found, tree, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_rows_on_a_cache_equal_one_pass(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SCORES", 4000)  # several chunks of queries
    q, k, v = draw(2, 70)
    sinks = torch.randn(HEADS)
    real = torch.ones(2, 70, dtype=torch.bool)
    real[0, :20] = False
    whole = sink_attention(q, k, v, Plan.padded(real.numpy()), sinks, window=window)
    last = cached_attention(q[:, :, 30:], k, v, sinks, window=window, real=real)
    torch.testing.assert_close(last, whole[:, :, 30:], rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_is_zero() -> None:
    q, k, v = draw(1, 4)
    out = cached_attention(q[:, :, 3:], k, v, torch.randn(HEADS), real=torch.zeros(1, 4, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_half_precision_stays_close() -> None:
    q, k, v = draw(1, 200)
    exact = cached_attention(q[:, :, -1:], k, v, torch.zeros(HEADS))
    half = cached_attention(*(x.bfloat16() for x in (q[:, :, -1:], k, v)), torch.zeros(HEADS))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", ["GptOss", "Qwen3", "Gemma3"])
def test_generation_with_left_padding_equals_eager(family: str) -> None:
    ids = torch.randint(1, 97, (2, 30))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    options = dict(
        max_new_tokens=25, min_new_tokens=25, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    mine, eager = (model.generate(input_ids=ids, attention_mask=mask, **options) for model in pair(family))
    assert torch.equal(mine.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(mine.logits), torch.stack(eager.logits), rtol=1e-3, atol=1e-3)


def test_mistakes_are_told() -> None:
    cache = GroupCache([None], 1, KV_HEADS, SIZE, capacity=4)
    with pytest.raises(ValueError, match="would hold 5 tokens; the cache was made with capacity=4"):
        cache.begin(5)
    mine, _ = pair("GptOss")
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="expected keys that end with the queries"):
        mine.generate(input_ids=ids, max_new_tokens=4, cache_implementation="static")
    held = mine(input_ids=ids, use_cache=True)
    with pytest.raises(ValueError, match="pass use_cache=False with a plan"):
        mine(input_ids=ids[:, :1], cache=held.cache, plan=Plan.causal(1))
