"""The benchmarks: cells run in their own process, refusals are rows, bars are judged, charts are well-formed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from sinkflex.attention.sink import kept_attention
from sinkflex.bench import attention, cell, packing, rollout, step, update
from sinkflex.bench.chart import log_chart
from sinkflex.learner import checkpointing
from sinkflex.train import train
from tests.test_train import config


def test_a_cell_runs_in_its_own_process_and_saves_linear_memory() -> None:
    row = cell.in_own_process(
        "sinkflex.bench.attention", {"section": "layer", "path": "sink_plan", "tokens": 256, "window": 128}
    )
    assert row["seconds"] > 0
    assert (
        row["saved_bytes"] == 256 * (attention.HEADS * attention.SIZE + attention.HEADS) * 4
    )  # out and its log-sum-exp


def test_a_cell_that_fails_is_a_row_that_says_why() -> None:
    row = cell.in_own_process("sinkflex.bench.attention", {"section": "path", "path": "sdpa"})
    assert "does not support" in row["refused"]
    assert "refused: ValueError" in attention.table([row])


def test_eager_keeps_the_square_and_ours_does_not() -> None:
    eager, ours = (
        attention.measure({"section": "layer", "path": path, "tokens": 512, "window": None})["saved_bytes"]
        for path in attention.PATHS
    )
    assert eager > 512 * 512 * attention.HEADS * 4 > 5 * ours


def test_a_step_has_the_same_loss_at_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    full = step.config_of
    monkeypatch.setattr(step, "config_of", lambda heads: full(layers=2, hidden=32, heads=heads, vocabulary=500))
    rows = [
        {"section": "step", "tokens": 64, "heads": 8, **stage}
        | step.measure({"tokens": 64, "heads": 8, "budget": False, **stage})
        for stage in step.STAGES
    ]
    assert all(row["nll"] == pytest.approx(rows[0]["nll"], rel=1e-5) for row in rows)
    assert rows[-1]["saved_bytes"] < rows[0]["saved_bytes"]
    assert all(stage["loss"] in step.table(rows) for stage in step.STAGES)
    ElementTree.fromstring(step.plot(rows))


def test_saved_bytes_count_the_attention_that_checkpointed_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    full, contexts, seen_by_autograd = step.config_of, [], []
    monkeypatch.setattr(step, "config_of", lambda heads: full(layers=2, hidden=32, heads=heads, vocabulary=500))
    monkeypatch.setattr(checkpointing, "kept_attention", lambda: contexts.append(kept_attention()) or contexts[-1])
    monkeypatch.setattr(
        step, "saved_bytes", lambda *given: seen_by_autograd.append(cell.saved_bytes(*given)) or seen_by_autograd[-1]
    )
    row = step.measure({"tokens": 64, "heads": 8, "budget": False, **step.OURS})
    kept = [x for first, _ in contexts[-2:] for result in first.results for x in result if x is not None]
    assert len(kept) == 2 * 2  # output and log-sum-exp of each layer
    assert row["saved_bytes"] == seen_by_autograd[0] + sum(x.untyped_storage().nbytes() for x in kept)


def test_bars_are_met_or_missed() -> None:
    rows = [
        {
            "section": "layer",
            "path": path,
            "tokens": 4096,
            "window": window,
            "seconds": s,
            "saved_bytes": b,
            "peak_bytes": b,
        }
        for path, s, b in (("eager", 11.0, 590), ("sink_plan", 1.0, 10))
        for window in (None, attention.WINDOW)
    ]
    rows += [
        {"section": "decode", "path": path, "cache": cache, "tokens": 4096, "seconds": 1.0}
        for path, cache in attention.DECODE
    ]
    judged = {bar["bar"]: bar["measured"] for bar in attention.bars(rows)}
    assert judged["saved bytes of both layers, 4096"] == 59
    assert judged["time of both layers, 4096"] == 11
    lines = attention.table(rows).splitlines()
    assert sum("MISSED" in line for line in lines) == 2  # saved bytes, and decoding as slow as eager
    assert sum(line.endswith(" met") for line in lines) == 1


def test_an_update_has_one_gradient_however_attention_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("PROMPT", 40), ("TOKENS", 100), ("MEMBERS", 2), ("GROUPS", 1)):
        monkeypatch.setattr(update, name, small)
    cells = [cell | update.measure(cell) for cell in update.CELLS]
    assert [row["gradient_norm"] for row in cells] == pytest.approx([cells[0]["gradient_norm"]] * 3, rel=1e-4)
    assert cells[0]["gradient_norm"] > 0
    assert len(update.table(cells).splitlines()) == 4


def test_the_peak_of_a_call_is_what_it_allocates() -> None:
    rise = cell.peak_rise(lambda: torch.ones(2**24).sum())
    if rise is None:
        pytest.skip("this kernel does not reset its high-water mark")
    assert 0.9 * 2**26 <= rise <= 1.5 * 2**26


def test_memory_over_what_is_allowed_is_refused() -> None:
    script = "import torch; from sinkflex.bench import cell; cell.allow_memory(2**28); torch.zeros({}); print('fits')"
    run = lambda n: subprocess.run([sys.executable, "-c", script.format(n)], capture_output=True, text=True)  # noqa: E731
    assert run(2**25).stdout == "fits\n"
    assert "allocate memory" in run(2**27).stderr


def test_the_longest_sequence_is_where_memory_ends_and_not_where_a_cell_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(stage: cell.Row, tokens: int, budget: bool) -> cell.Row:
        found = {**stage, "tokens": tokens, "heads": 8, "tokens_per_second": 1.0}
        return {**found, "refused": reason} if tokens > 5000 else {**found, "peak_bytes": 4e5 * tokens}

    monkeypatch.setattr(step, "_cell", measured)
    reason = "RuntimeError: can't allocate memory"
    eager, ours = step.longest(step.EAGER), step.longest(step.OURS)
    assert eager["tokens"] == ours["tokens"] == 4608  # the ladder's last step below 5000 tokens
    assert step.bars([eager, ours])[-1]["measured"] == 1.0
    reason = "exit -15"
    killed = step.longest(step.OURS)
    assert killed["refused"] == "exit -15"
    assert step.bars([eager, killed])[-1]["measured"] is None
    assert "refused: exit -15" in step.table([killed])


def test_a_cell_over_its_time_is_refused() -> None:
    row = cell.in_own_process("sinkflex.bench.attention", {"section": "path", "path": "sdpa"}, cpu_limit_seconds=1)
    assert row["refused"] == "not done in 1 s of CPU time"


def test_a_chart_is_well_formed_and_names_its_lines() -> None:
    chart = log_chart(
        "a < b", "tokens", "MB", {"ours": [(1024, 3.0), (2048, 6.0)], "eager": [(1024, 40.0)], "none": []}
    )
    root = ElementTree.fromstring(chart)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    ElementTree.fromstring(log_chart("nothing measured", "tokens", "MB", {"ours": []}))
    assert {"a < b", "tokens", "MB", "ours", "eager", "1024", "2048"} <= set(texts) and "none" not in texts


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["telecom", "retail"])
def test_a_group_with_the_full_policy_has_one_gradient_however_it_is_packed(
    domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MEMBERS", 3)
    alone, forest = (
        {"part": "group", "domain": domain, "rows": rows}
        | packing.measure({"part": "group", "domain": domain, "rows": rows})
        for rows in ("alone", "forest")
    )
    assert alone["gradient_norm"] == pytest.approx(forest["gradient_norm"], rel=1e-5)
    assert alone["tokens"] / forest["tokens"] > 1.5 and forest["tokens"] > 3000, "the policy is most of the prompt"
    assert "times fewer tokens" in packing.table([alone, forest])


def test_ways_to_sample_differ_in_their_work_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(tmp_path / "run", "train.steps=1"))
    monkeypatch.setattr(rollout, "ROUNDS", 1)
    cells: list[cell.Row] = [{"part": "episodes", "way": way, "run": str(tmp_path / "run")} for way in rollout.WAYS]
    anew, cache, drafts = rows = [row | rollout.measure(row) for row in cells]
    assert anew["sampled"] == cache["sampled"] == drafts["sampled"] and anew["reward"] == drafts["reward"]
    assert anew["copied"] == 0 < cache["copied"] and anew["prefilled"] > cache["prefilled"]
    assert cache["rejected"] == anew["rejected"] == 0 and drafts["passes"] <= cache["passes"]
    assert len(rollout.table(rows).splitlines()) == 4


def test_a_late_turn_costs_what_an_early_one_costs_with_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "TALKS", 2)
    cells: list[cell.Row] = [{"part": "growth", "way": way} for way in rollout.WAYS[:2]]
    rows = [row | rollout.measure(row) for row in cells]
    assert all(len(row["per_token"]) == rollout.TURNS for row in rows)
    anew, cache = (sum(row["per_token"][-4:]) / sum(row["per_token"][:4]) for row in rows)
    assert cache < anew, "without a cache each turn computes all that came before"
    assert "turn 20 against turn 2" in rollout.table(rows) and rollout.plot(rows).startswith("<svg")
