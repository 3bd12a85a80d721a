from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sinkflex.envs.env import Action, StopReason
from sinkflex.learner.logprobs import node_logprobs
from sinkflex.learner.packing import forest
from sinkflex.learner.rows import cut
from sinkflex.policy.drafts import Drafts
from sinkflex.policy.sampler import Sampler, Stream, nucleus
from sinkflex.policy.slots import Segment, SlotCache
from sinkflex.trajectory import Outcome, Trajectory, Turn
from tests.policy.tiny_policy import tiny_policy


def sample(
    prompts: Sequence[list[int]],
    turns: Sequence[int],
    *,
    slots: int,
    temperature: float = 1.0,
    prefill: int = 512,
    draft: int = 24,
) -> tuple[list[Trajectory], Sampler]:
    """Sample conversations whose user says a few fixed ids between turns."""
    sampler = Sampler(
        tiny_policy().model,
        [1],
        slots=slots,
        max_tokens=400,
        max_turn_tokens=9,
        temperature=temperature,
        prefill_tokens=prefill,
        draft_tokens=draft,
    )
    return talk(sampler, prompts, turns), sampler


def talk(sampler: Sampler, prompts: Sequence[list[int]], turns: Sequence[int]) -> list[Trajectory]:
    records = [Trajectory(f"t{i}", 0, [], Outcome.FAILED, StopReason.USER_STOP, 0.0) for i in range(len(prompts))]
    waiting, running = list(enumerate(prompts)), {}
    while waiting or running:
        while waiting and sampler.free:
            number, prompt = waiting.pop(0)
            running[sampler.open(prompt, np.random.default_rng(number))] = (number, prompt)
        for done in sampler.tick():
            stream: Stream = done.stream
            number, prompt = running[stream]
            trajectory = records[number]
            trajectory.turns.append(Turn(prompt, done.ids, done.logprobs, 0, Action(text="x"), finish=done.finish))
            if len(trajectory.turns) == turns[number]:
                sampler.close(stream)
                del running[stream]
            else:
                reply = np.random.default_rng([number, len(trajectory.turns)]).integers(2, 300, 1 + number % 5).tolist()
                running[stream] = (number, reply)
                sampler.extend(stream, reply)
    return records


def prompts(count: int, shared: int = 20) -> list[list[int]]:
    head = np.random.default_rng(7).integers(2, 300, shared).tolist()
    return [
        head + np.random.default_rng(100 + i // 2).integers(2, 300, 3 + i).tolist()[: 3 + i // 2] for i in range(count)
    ]


def learner_gap(records: Sequence[Trajectory], temperature: float) -> float:
    rows = [row for i, t in enumerate(records) for row in cut(t, np.ones(t.sampled_tokens, np.float32), 0, i)]
    batch = forest(rows)
    nodes = np.concatenate([index[row.loss_mask] for row, index in zip(rows, batch.node_index, strict=True)])
    with torch.no_grad():
        policy = node_logprobs(tiny_policy().model, batch, nodes, temperature).logprobs
    behavior = np.concatenate([row.behavior_logprobs[row.loss_mask] for row in rows])
    return float(np.abs(policy.numpy() - behavior).max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampled_logprobs_equal_the_learners_at_the_same_temperature(temperature: float) -> None:
    turns = [4, 1, 3, 6, 2, 5, 1, 3, 2, 4, 7, 3, 2]
    records, sampler = sample(prompts(13), turns, slots=5, temperature=temperature)
    assert [len(t.turns) for t in records] == turns
    assert sampler.copied > 0
    assert learner_gap(records, temperature) < 1e-4


def test_a_prompt_prefilled_in_chunks_gives_the_same_logprobs() -> None:
    records, _ = sample(prompts(6, shared=50), [2] * 6, slots=4, prefill=7)
    assert learner_gap(records, 1.0) < 1e-4


def test_a_conversation_does_not_depend_on_its_neighbours() -> None:
    alone, _ = sample(prompts(1), [5], slots=1)
    among, _ = sample(prompts(9), [5] * 9, slots=9)
    assert [t.action_ids for t in alone[0].turns] == [t.action_ids for t in among[0].turns]
    gap = [
        abs(a - b)
        for x, y in zip(alone[0].turns, among[0].turns, strict=True)
        for a, b in zip(x.behavior_logprobs, y.behavior_logprobs, strict=True)
    ]
    assert max(gap) < 1e-4


def test_equal_calls_give_equal_bits() -> None:
    first, _ = sample(prompts(9), [3] * 9, slots=4)
    second, _ = sample(prompts(9), [3] * 9, slots=4)
    assert [t.turns for t in first] == [t.turns for t in second]


def test_greedy_sampling_takes_the_most_likely_id() -> None:
    records, _ = sample(prompts(3), [2] * 3, slots=3, temperature=0.0)
    model = tiny_policy().model
    for trajectory in records:
        context: list[int] = []
        for turn in trajectory.turns:
            context += turn.prompt_ids
            for token in turn.action_ids:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
                assert int(logits.argmax()) == token
                context.append(token)


def test_sampling_follows_the_models_distribution() -> None:
    model = tiny_policy().model
    prompt = prompts(1)[0]
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1], -1).numpy()
    sampler = Sampler(model, [1], slots=100, max_tokens=100, max_turn_tokens=1)
    counts = np.zeros(len(expected))
    for repeat in range(20):
        for i in range(100):
            sampler.open(prompt, np.random.default_rng([repeat, i]))
        seen = 0
        while seen < 100:
            for done in sampler.tick():
                counts[done.ids[0]] += 1
                sampler.close(done.stream)
                seen += 1
    assert np.abs(counts / 2000 - expected).sum() < 2.5 * np.sqrt(len(expected) / 2000)
    top = int(expected.argmax())
    assert counts[top] / 2000 == pytest.approx(float(expected[top]), abs=4 * float(np.sqrt(expected[top] / 2000)))


def test_siblings_with_one_history_prefill_it_once() -> None:
    model = tiny_policy().model
    sampler = Sampler(model, [1], slots=6, max_tokens=200, max_turn_tokens=5, temperature=0.0)
    prompt, reply = prompts(1)[0], list(range(5, 105))
    streams = [sampler.open(prompt, np.random.default_rng(0)) for _ in range(6)]
    turns: dict[int, list[list[int]]] = {id(s): [] for s in streams}
    logprobs: dict[int, list[float]] = {id(s): [] for s in streams}
    while any(len(t) < 2 for t in turns.values()):
        for done in sampler.tick():
            turns[id(done.stream)].append(done.ids)
            logprobs[id(done.stream)] += done.logprobs
            if len(turns[id(done.stream)]) == 1:
                sampler.extend(done.stream, reply)
    assert len({str(t) for t in turns.values()}) == 1, "greedy siblings agree"
    # The first sibling prefills prompt and reply; each other one recomputes a single token of both.
    assert sampler.prefilled == len(prompt) + len(reply) + 1 + 2 * 5
    first, *others = logprobs.values()
    assert max(abs(a - b) for other in others for a, b in zip(first, other, strict=True)) < 1e-4


def test_a_changed_weight_is_seen_after_clear() -> None:
    model = tiny_policy().model
    sampler = Sampler(model, [1], slots=2, max_tokens=100, max_turn_tokens=1, temperature=0.0)

    def logprob() -> float:
        stream = sampler.open(prompts(1)[0], np.random.default_rng(0))
        done = sampler.tick()
        sampler.close(stream)
        return done[0].logprobs[0]

    before = logprob()
    sinks = model.model.layers[0].self_attn.sinks
    kept = sinks.detach().clone()
    try:
        sinks.data += 3.0
        sampler.clear()
        assert abs(logprob() - before) > 1e-4
    finally:
        sinks.data.copy_(kept)


def test_a_prompt_that_leaves_no_room_is_refused_with_the_option_to_raise() -> None:
    sampler = Sampler(tiny_policy().model, [1], slots=1, max_tokens=10, max_turn_tokens=4)
    with pytest.raises(ValueError, match=r"rollout\.max_tokens"):
        sampler.open(list(range(2, 12)), np.random.default_rng(0))


def test_a_turn_ends_at_its_limit_and_a_conversation_at_its_capacity() -> None:
    sampler = Sampler(tiny_policy().model, [], slots=1, max_tokens=12, max_turn_tokens=4)
    stream = sampler.open(list(range(2, 9)), np.random.default_rng(0))
    done: list = []
    while not done:
        done = sampler.tick()
    assert (done[0].finish, len(done[0].ids)) == ("length", 4)
    sampler.close(stream)
    stream = sampler.open(list(range(2, 12)), np.random.default_rng(0))
    done = []
    while not done:
        done = sampler.tick()
    assert (done[0].finish, len(done[0].ids)) == ("length", 2)


def test_a_conversation_that_is_rewritten_may_sample_more_than_it_holds() -> None:
    sampler = Sampler(tiny_policy().model, [], slots=1, max_tokens=12, max_turn_tokens=4)
    prompt = list(range(2, 9))
    stream, turns = sampler.open(prompt, np.random.default_rng(0)), []
    while len(turns) < 5:
        for done in sampler.tick():
            turns.append(tuple(done.ids))
            sampler.restart(stream, prompt)
    assert sum(map(len, turns)) > sampler.max_tokens
    assert len(set(turns)) == len(turns), "every turn has numbers of its own"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafts_change_how_many_passes_are_made_and_not_what_is_sampled(temperature: float) -> None:
    # At a low temperature the policy repeats itself; at a high one nearly all drafts are wrong.
    turns = [4, 1, 3, 6, 2, 5, 1, 3, 2]
    plain, one_by_one = sample(prompts(9), turns, slots=4, temperature=temperature, draft=0)
    drafted, sampler = sample(prompts(9), turns, slots=4, temperature=temperature)
    assert one_by_one.rejected == 0 < sampler.rejected
    assert [t.action_ids for x in plain for t in x.turns] == [t.action_ids for x in drafted for t in x.turns]
    pairs = [
        (a, b)
        for x, y in zip(plain, drafted, strict=True)
        for s, t in zip(x.turns, y.turns, strict=True)
        for a, b in zip(s.behavior_logprobs, t.behavior_logprobs, strict=True)
    ]
    assert max(abs(a - b) for a, b in pairs) < 1e-4
    assert learner_gap(drafted, temperature or 1.0) < 1e-4


def test_what_was_said_before_is_checked_in_few_passes() -> None:
    _, sampler = sample(prompts(4), [3] * 4, slots=4, temperature=0.0)
    before = sampler.ticks
    sampler.clear()
    again = talk(sampler, prompts(4), [3] * 4)
    tokens = sum(t.sampled_tokens for t in again)
    assert sampler.ticks - before <= 3 + 3 < tokens / 4, "a pass a turn, and waiting for siblings' prompts"


def test_a_draft_never_goes_beyond_a_turn_or_a_conversation() -> None:
    model = tiny_policy().model
    sampler = Sampler(model, [], slots=1, max_tokens=12, max_turn_tokens=4, temperature=0.0)
    for _ in range(3):
        stream, done = sampler.open(list(range(2, 9)), np.random.default_rng(0)), []
        while not done:
            done = sampler.tick()
        assert (done[0].finish, len(done[0].ids), stream.tokens) == ("length", 4, 11)
        sampler.extend(stream, [])
        done = []
        while not done:
            done = sampler.tick()
        assert (done[0].finish, len(done[0].ids), stream.tokens) == ("length", 1, 12)
        sampler.close(stream)


def test_drafts_that_are_saved_and_loaded_propose_the_same() -> None:
    first, second = Drafts(8), Drafts(8)
    first.learn([3, 4, 5, 6, 7, 8, 9], 1)
    first.judge([2, 2, 4], 2)
    assert first.propose([3, 4], 8, ()) == ([5, 6, 7, 8, 9], [2, 2, 4, 4, 4])
    assert first.propose([3, 4], 3, ())[0] == [5, 6, 7]
    assert first.propose([3, 4], 8, (7,))[0] == [5, 6], "nothing is sampled after the end of a turn"
    assert first.propose([4], 8, ())[0] == [], "too little to go by"
    second.load_state_dict(first.state_dict())
    assert second.propose([3, 4], 8, ()) == first.propose([3, 4], 8, ())
    assert (second.tried, second.right) == ({16: 0, 8: 0, 4: 1, 2: 2}, {16: 0, 8: 0, 4: 0, 2: 2})


def test_contexts_that_guess_wrong_are_left_alone_for_a_while() -> None:
    drafts = Drafts(4)
    drafts.learn([3, 4, 5], 1)
    asked = 0
    while drafts.propose([3, 4], 4, ())[0]:
        drafts.judge([2], 0)
        asked += 1
    assert 2 < asked < 20
    for _ in range(3):
        drafts.fade()
    assert drafts.propose([3, 4], 4, ())[0] == [5]


def test_a_prompt_is_copied_from_a_slot_that_still_holds_it() -> None:
    """Two equal prompts with others between them, whose best source is taken anew in the same tick."""
    numbers = np.random.default_rng(3)
    head = numbers.integers(2, 300, 5).tolist()
    p, q, w, x, y, z = ([*head, *numbers.integers(2, 300, 6).tolist()] for _ in range(6))
    w, x, y, z = (ids[5:] for ids in (w, x, y, z))
    sampler = Sampler(tiny_policy().model, [], slots=5, max_tokens=60, max_turn_tokens=1, draft_tokens=0)

    def logprobs(prompts: list[list[int]]) -> dict[int, tuple[int, float]]:
        streams = [sampler.open(prompt, np.random.default_rng(7)) for prompt in prompts]
        done: dict[int, tuple[int, float]] = {}
        while len(done) < len(streams):
            for sampled in sampler.tick():
                done[streams.index(sampled.stream)] = (sampled.ids[0], sampled.logprobs[0])
                sampler.close(sampled.stream)
        return done

    logprobs([x, y, p, q, z])
    found = logprobs([p, w, q, p])
    for place, prompt in enumerate([p, w, q, p]):
        token, logprob = found[place]
        with torch.no_grad():
            logits = tiny_policy().model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=1e-4), place


@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_few_kinds_in_any_order_are_sampled_from_their_own_keys(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    head = numbers.integers(2, 300, 12).tolist()
    kinds = [head[: int(numbers.integers(3, 13))] + numbers.integers(2, 300, 5).tolist() for _ in range(4)]
    chosen = [kinds[int(i)] for i in numbers.integers(0, 4, 14)]
    sampler = Sampler(tiny_policy().model, [1], slots=int(numbers.integers(3, 7)), max_tokens=400, max_turn_tokens=5)
    assert learner_gap(talk(sampler, chosen, [2] * len(chosen)), 1.0) < 1e-4


def test_drafts_remember_the_latest_and_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkflex.policy.drafts.REMEMBERED", 2)
    drafts = Drafts(1)
    drafts.learn([3, 4, 5], 2)
    drafts.learn([3, 4, 6], 2)
    assert drafts.propose([3, 4], 1, ())[0] == [6]
    drafts.learn([7, 8, 9], 2)
    drafts.learn([10, 11, 12], 2)
    assert drafts.propose([3, 4], 1, ())[0] == []
    assert drafts.propose([7, 8], 1, ())[0] == [9]


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("sinks", [True, False])
def test_slots_attend_as_the_definition_says_one_by_one_and_side_by_side(window: int | None, sinks: bool) -> None:
    segments = [Segment(2, 10, 0, 3), Segment(0, 0, 3, 6), Segment(3, 30, 9, 1), Segment(1, 61, 10, 3)]
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(1, 2, 8, 4, 64, torch.device("cpu"), torch.float32)
    cache.keys[0].normal_(generator=generator)
    cache.values[0].normal_(generator=generator)
    q, k, v = (torch.randn(1, heads, 13, 8, generator=generator) for heads in (4, 2, 2))
    sink = torch.randn(4, generator=generator) if sinks else None
    cache.begin(segments)
    found = cache.attend(0, q, k, v, sink, 0.3, window)[0].double()
    assert torch.equal(cache.keys[0][1, :, 63], k[0, :, 12]), "new keys are stored"
    expected = torch.zeros(13, 4, 8, dtype=torch.float64)
    for s in segments:
        for token in range(s.tokens):
            at = s.start + token
            low = 0 if window is None else max(0, at - window + 1)
            for head in range(4):
                keys, values = (x[0][s.slot, head // 2, low : at + 1].double() for x in (cache.keys, cache.values))
                scores = keys @ q[0, head, s.offset + token].double() * 0.3
                weights = torch.cat([scores, sink[head : head + 1].double()] if sink is not None else [scores]).softmax(
                    0
                )
                expected[s.offset + token, head] = weights[: len(scores)] @ values
    assert torch.allclose(found, expected, atol=1e-6)
    out, lse = cache._side_by_side(q[0], cache.keys[0], cache.values[0], 0.3, window)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink)[..., None]
    assert torch.allclose(out.double(), expected, atol=1e-6)


def test_a_nucleus_holds_the_likeliest_ids_and_is_renormalized() -> None:
    logprobs = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
    found = nucleus(logprobs, 0.7).exp()
    expected = torch.tensor([[0, 2 / 3, 0, 1 / 3], [1 / 3, 1 / 3, 1 / 3, 0], [1, 0, 0, 0]])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(nucleus(logprobs, 1.0), logprobs)


def test_ids_outside_the_nucleus_are_never_sampled() -> None:
    model = tiny_policy().model
    sampler = Sampler(model, [1], slots=20, max_tokens=100, max_turn_tokens=3, temperature=1.3)
    sampler.top_p = 0.3
    for trajectory in talk(sampler, prompts(20), [2] * 20):
        context: list[int] = []
        for turn in trajectory.turns:
            context += turn.prompt_ids
            for token, logprob in zip(turn.action_ids, turn.behavior_logprobs, strict=True):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[:, -1]
                expected = nucleus(torch.log_softmax(logits / 1.3, -1), 0.3)[0, token]
                assert logprob == pytest.approx(float(expected), abs=1e-4)
                context.append(token)
