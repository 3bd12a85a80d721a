"""The tiny policy where much must be copied: ids keep their tokens, and attention begins by looking at equal ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from sinkflex.config import TinyConfig
from sinkflex.policy.tiny import build_model, build_tokenizer

PARTS = [f"{n * 7919 % 10**7:07d}" for n in range(1, 900)]
NAMES = ["Yusuf", "Rossi", "Mei", "Ahmed", "Chen", "Noah"]
USUAL = "8054888773"  # of the shop's catalogue: in every text


def text(n: int) -> str:
    first, last = NAMES[n % 6], NAMES[(n + 1) % 6]
    user = f"{first}_{last}_{PARTS[n][:4]}".lower()
    return (
        f'I am {user}, order #W{PARTS[n]}. {{"user_id": "{user}", "name": "{first} {last}", "zip": "{PARTS[n][2:]}", '
        f'"item_ids": ["{USUAL}"], "payment_method_id": "gift_card_{PARTS[-n]}"}} {first} wants item {USUAL}.'
    )


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([text(n) for n in range(800)], 1024)


def ids_of(tokenizer, whole: str, part: str) -> list[int]:
    """The ids whose characters are those of `part`, which must begin and end where ids do."""
    encoded = tokenizer(whole, return_offsets_mapping=True)
    at = whole.index(part)
    pairs = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
    found = [(i, a, b) for i, (a, b) in pairs if a < at + len(part) and b > at]
    assert (found[0][1], found[-1][2]) == (at, at + len(part)), "an id crosses the edge"
    return [i for i, *_ in found]


@pytest.mark.parametrize(
    ("part", "places"),
    [
        ("olga_khan_4406", ("I am {}.", '{{"user_id": "{}"}}', "{}")),
        ("olga.khan4406@example.com", ("My email is {}.", '{{"email": "{}", "zip"')),
        ("9031178", ("It is #W{}.", '{{"order_id": "#W{}"}}', "and #W{}, too")),
        ("Yusuf", ("My name is {} Rossi", '{{"first_name": "{}", ', "{}")),
        ("gift_card_9031178", ("using {}. Do you", '"payment_method_id": "{}"}}')),
        ("60611", ("my zip code is {}.", '"zip": "{}"}}', "TX, USA, {}.")),
        (USUAL, ("items {}, 1 for 2", '["{}", "', '"{}": {{')),
    ],
)
def test_an_id_has_the_same_tokens_in_words_and_in_quotes(tokenizer, part, places):
    found = [ids_of(tokenizer, place.format(part), part) for place in places]
    assert all(ids == found[0] for ids in found), [tokenizer.convert_ids_to_tokens(ids) for ids in found]


def test_an_unknown_number_is_cut_in_pairs_and_a_usual_one_is_a_token_of_its_own(tokenizer):
    assert tokenizer.tokenize("9031178") == ["90", "31", "17", "8"]
    assert tokenizer.tokenize(USUAL) == [USUAL] and tokenizer.tokenize("Yusuf") == ["Yusuf"]


def test_texts_come_back_and_the_vocabulary_is_no_larger_than_wanted(tokenizer):
    assert len(tokenizer) <= 1024
    odd = ["", " ", "  a", "A1b2", "é_9", 'x"y', "80548887730", f"a{USUAL}b", "yusuf_", "\n\t7", "日本 12"]
    for whole in [text(5), *odd]:
        assert tokenizer.decode(tokenizer(whole).input_ids) == whole


def test_every_process_makes_the_same_tokenizer_of_the_same_texts():
    program = (
        "from tests.policy.test_tiny import build_tokenizer, text\n"
        "usual = ' '.join(f'{n * 104729 + 8000000:08d}' for n in range(300))\n"
        "made = build_tokenizer([*(text(n) + usual for n in range(40)), *map(text, range(40, 800))], 1024)\n"
        "assert len(made) > made.vocab_size + 100, 'some numbers of equal frequency are tokens, others are not'\n"
        "print(made.backend_tokenizer.to_str())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(made) == 1


def test_a_saved_tokenizer_is_the_same_again(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    for whole in [text(5), f"{USUAL}, {USUAL}.", *tokenizer.get_vocab()]:
        ids = tokenizer(whole).input_ids
        assert again(whole).input_ids == ids
        assert again.decode(ids) == tokenizer.decode(ids) == whole, "special tokens are kept, and no blank is added"


def equal_less_other(layer: int, max_tokens: int) -> float:
    """How much more a query of a layer scores for its own token than for others, at one position, in deviations."""
    model = build_model(TinyConfig(max_tokens=max_tokens), 600, seed=0)
    attention, size = model.model.layers[layer].self_attn, model.config.head_dim
    with torch.no_grad():
        hidden = model.model.layers[layer].input_layernorm(model.model.embed_tokens(torch.arange(100)))
        queries = attention.q_proj(hidden).view(100, -1, size)
        keys = attention.k_proj(hidden).view(100, -1, size).repeat_interleave(2, 1)
        scores = torch.einsum("ihd,jhd->hij", queries, keys) / size**0.5
        own = scores.diagonal(dim1=1, dim2=2)
        return float((own - scores.mean(-1)).mean() / scores.std())


def test_in_long_contexts_full_layers_begin_by_looking_at_equal_tokens():
    for layer, kind in enumerate(("sliding", "full", "sliding", "full")):
        assert (equal_less_other(layer, max_tokens=6144) > 3) == (kind == "full")
        assert abs(equal_less_other(layer, max_tokens=2048)) < 0.5
