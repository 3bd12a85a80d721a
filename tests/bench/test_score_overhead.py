"""The benchmark of scoring: it measures what it says, and judges it."""

from __future__ import annotations

from sinkflex.bench import update
from sinkflex.config import TinyConfig
from sinkflex.learner.packing import forest
from tests.methods.test_comparison import script

score = script("score")


def test_scoring_is_measured_over_a_bare_pass_on_the_packed_tokens() -> None:
    shape = TinyConfig(hidden=32, layers=1, heads=2, head_dim=16, intermediate=32)
    found = score.measure(shape, (1, 2, 40, 100, 600), rounds=1)
    assert found["tokens"] == len(forest(update.synthetic_rows(1, 2, 40, 100, 600))) == 160
    assert found["bare"] == 1 and found["seconds"] > 0 and found["sampled"] > 0 and found["candidates"] > 0


def test_a_ratio_over_the_bar_is_missed() -> None:
    good = {"tokens": 9, "seconds": 1.0, "bare": 1.0, "sampled": 1.02, "candidates": 1.1}
    text = score.table({"main job": good, "width 512": {**good, "candidates": 1.2}})
    assert [line.rpartition(" ")[2] for line in text.splitlines()[1:]] == ["met", "MISSED"]
