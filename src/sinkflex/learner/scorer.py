"""What other models, or the policy under another prompt, say about tokens that were sampled.

A scorer knows its models by name: "policy" (as it is now), "reference" (after the warm start), or a folder. Rows are
scored in packs, each node of a prefix forest once, without gradient; one pass a model. Between its passes a model is
kept in the host's memory if the policy is on a GPU.

Shape letters: T tokens of a row, K candidates, N tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkflex.attention.plan import Plan
from sinkflex.envs.env import Message
from sinkflex.learner.logprobs import node_logprobs, plain_head, sampled_nodes
from sinkflex.learner.packing import Batch, forest, micro_batches
from sinkflex.policy.chat import Chat
from sinkflex.policy.lora import save_model
from sinkflex.policy.sampler import Sampler
from sinkflex.seeds import generator
from sinkflex.trajectory import Row

CHUNK = 256  # tokens whose whole distributions exist at once

Edit = Callable[[Row], Row]


class Scorer:
    """Scores rows and writes texts.

    Args:
        named: models by name, made when first asked for.
        load: returns the frozen model of a folder; it checks that the vocabulary is the policy's.
        chat, sampler: how the policy writes.
        temperature: of log-probs, unless a call says otherwise.
        budget: forest nodes of one forward pass.
    """

    def __init__(
        self,
        named: Mapping[str, Callable[[], PreTrainedModel]],
        load: Callable[[Path], PreTrainedModel],
        chat: Chat,
        sampler: Sampler,
        temperature: float,
        budget: int,
    ) -> None:
        self._named = dict(named)
        self._load = load
        self._models: dict[str, PreTrainedModel] = {}
        self._lent: set[str] = set()
        self.chat, self._sampler = chat, sampler
        self._temperature, self._budget = temperature, budget

    def model(self, name: str) -> PreTrainedModel:
        """Return a model by name or folder; it is loaded once, and from now on stays on the policy's device."""
        self._lent.add(name)
        model = self._loaded(name)
        cast(torch.nn.Module, model).to(self._loaded("policy").device)
        return model

    def save(self, name: str, folder: Path) -> None:
        """Write a model's weights and config as `policy/lora.py` does."""
        save_model(self._loaded(name), folder)

    def logprobs(
        self,
        rows: Sequence[Row],
        model: str = "policy",
        candidates: str = "",
        edit: Edit | None = None,
        temperature: float | None = None,
    ) -> list[np.ndarray]:
        """Return a model's log-probs of the sampled tokens, or of candidates in their place.

        Args:
            rows: in any order.
            model: name or folder.
            candidates: name of an int64 [T, K] stream of ids to score in place of the sampled ones; "" for none.
            edit: changes the prompts of a row; its sampled ids must stay, in their order. Results keep the places of
                the row that was given.
            temperature: logits are divided by it.

        Returns:
            For each row float32 [T], or [T, K] with candidates; 0 where `loss_mask` is False.
        """

        def score(batch: Batch) -> tuple[np.ndarray, ...]:
            ids = None
            if candidates:
                ids = np.concatenate([row.streams[candidates][row.loss_mask] for row in batch.rows])
            heat = self._temperature if temperature is None else temperature
            scores = node_logprobs(awake, batch, sampled_nodes(batch), heat, candidates=ids)
            found = scores.candidate_logprobs if candidates else scores.logprobs
            assert found is not None
            return (found.float().cpu().numpy(),)

        with self._at_work(model) as awake:
            return [of_row for (of_row,) in self._packed(rows, edit, score)]

    def top_k(self, rows: Sequence[Row], model: str = "policy", k: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each row the k likeliest ids in place of each sampled one, and their log-probs, [T, k] each."""

        def score(batch: Batch) -> tuple[np.ndarray, ...]:
            return _likeliest(awake, batch, sampled_nodes(batch), self._temperature, k)

        with self._at_work(model) as awake:
            return [(ids, logprobs) for ids, logprobs in self._packed(rows, None, score)]

    def generate(
        self,
        conversations: Sequence[Sequence[Message]],
        key: tuple[int, str, int],
        max_tokens: int = 0,
        temperature: float = 0.0,
    ) -> list[str]:
        """Let the policy answer conversations, and return its texts without the token that ends a turn.

        A conversation that leaves no room for an answer gets "".

        Args:
            conversations: messages; a system message in front stands after the system text.
            key: what the texts are for, (run seed, purpose, step); keys the random draws.
            max_tokens: of one text; 0 takes the limit of a turn.
            temperature: 0 is greedy.
        """
        sampler, texts = self._sampler, [""] * len(conversations)
        of_a_turn, sampler.max_turn_tokens = sampler.max_turn_tokens, max_tokens or sampler.max_turn_tokens
        sampler.clear()
        sampler.temperature = temperature
        waiting, open_streams = list(enumerate(conversations))[::-1], {}
        while waiting or open_streams:
            while waiting and sampler.free:
                index, messages = waiting.pop()
                ids = self.chat.start(messages)
                if len(ids) < sampler.max_tokens:
                    open_streams[sampler.open(ids, generator(*key, index))] = index
            for sampled in sampler.tick():
                ids = sampled.ids[:-1] if sampled.finish == "stop" else sampled.ids
                texts[open_streams.pop(sampled.stream)] = str(self.chat.tokenizer.decode(ids))
                sampler.close(sampled.stream)
        sampler.max_turn_tokens = of_a_turn
        return texts

    def _loaded(self, name: str) -> PreTrainedModel:
        if name not in self._models:
            make = self._named.get(name)
            self._models[name] = make() if make else self._load(Path(name))
        return self._models[name]

    @contextmanager
    def _at_work(self, name: str) -> Iterator[PreTrainedModel]:
        """Lend a model for one pass, after which it leaves the policy's GPU.

        What `model` has handed out stays, and so does an adapter on the policy's own weights.
        """
        model, policy = self._loaded(name), self._loaded("policy")
        apart = name not in self._lent and set(model.parameters()).isdisjoint(policy.parameters())
        leaves = apart and policy.device.type != "cpu"
        if leaves:
            cast(torch.nn.Module, model).to(policy.device)
        try:
            yield model
        finally:
            if leaves:
                cast(torch.nn.Module, model).to("cpu")

    @torch.no_grad()
    def _packed(
        self, rows: Sequence[Row], edit: Edit | None, score: Callable[[Batch], tuple[np.ndarray, ...]]
    ) -> list[tuple[np.ndarray, ...]]:
        """Score rows pack by pack, and put what comes back, [N, ...] each, in the places of the rows."""
        scored = [edit(row) if edit else row for row in rows]
        for row, other in zip(rows, scored, strict=True):
            assert np.array_equal(row.token_ids[row.loss_mask], other.token_ids[other.loss_mask]), "an id was edited"
        home = {id(other): number for number, other in enumerate(scored)}
        results: list[tuple[np.ndarray, ...]] = [()] * len(rows)
        for part in micro_batches([row for row in scored if row.loss_mask.any()], self._budget):
            values = score(forest(part))
            ends = np.cumsum([row.loss_mask.sum() for row in part])[:-1]
            for row, *found in zip(part, *(np.split(of_pack, ends) for of_pack in values), strict=True):
                number = home[id(row)]
                results[number] = tuple(_placed(rows[number], of_row) for of_row in found)
        return results


def insert(row: Row, at: int, ids: Sequence[int]) -> Row:
    """Return a row with prompt ids inserted before its token `at`: nothing that was sampled changes."""
    new = np.asarray(ids, np.int64)

    def widened(values: np.ndarray, filler: int | float | bool) -> np.ndarray:
        return np.insert(values, at, np.full((len(new), *values.shape[1:]), filler, values.dtype), axis=0)

    return replace(
        row,
        token_ids=np.insert(row.token_ids, at, new),
        loss_mask=widened(row.loss_mask, False),
        behavior_logprobs=widened(row.behavior_logprobs, 0.0),
        advantages=widened(row.advantages, 0.0),
        policy_version=widened(row.policy_version, -1),
        turn_index=widened(row.turn_index, int(row.turn_index[at])),
        streams={name: widened(values, 0) for name, values in row.streams.items()},
    )


def require_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuse a model whose ids mean something else than the policy's.

    Raises:
        ValueError: with the first such id and its token on both sides.
    """
    mine, theirs = policy.get_vocab(), other.get_vocab()
    if differs := mine.items() ^ theirs.items():
        first = min(number for _, number in differs)
        token, expected = ([t for t, n in known.items() if n == first] or ["nothing"] for known in (theirs, mine))
        raise ValueError(
            f"{folder}: its vocabulary is not the policy's: id {first} is {token[0]!r} there and {expected[0]!r} in "
            "the policy. Type the folder of a model with the policy's tokenizer."
        )


def _placed(row: Row, values: np.ndarray) -> np.ndarray:
    result = np.zeros((len(row), *values.shape[1:]), values.dtype)
    result[row.loss_mask] = values
    return result


def _likeliest(
    model: PreTrainedModel, batch: Batch, nodes: np.ndarray, temperature: float, k: int
) -> tuple[np.ndarray, np.ndarray]:
    device = model.device
    nodes, which = np.unique(nodes, return_inverse=True)
    parents = torch.from_numpy(batch.parent[nodes]).to(device)
    inputs = {
        "input_ids": torch.from_numpy(batch.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(batch.position)[None].to(device),
        "use_cache": False,
        "plan": Plan(batch.subtree_end),
    }
    head = model.get_output_embeddings()
    if plain_head(model) and head is not None:
        hidden = model.base_model(**inputs).last_hidden_state[0, parents]
        logits = (head(part) for part in hidden.split(CHUNK))
    else:
        logits = model(**inputs, logits_to_keep=parents).logits[0].split(CHUNK)
    best = [torch.log_softmax(part.float() / temperature, -1).topk(k) for part in logits]
    ids, logprobs = torch.cat([b.indices for b in best]), torch.cat([b.values for b in best])
    return ids.cpu().numpy()[which], logprobs.cpu().numpy()[which]
