"""The environments' bench: its record has what its table and bars read."""

from __future__ import annotations

from sinkflex.bench import env


def test_a_domain_is_measured_and_held_against_its_bars():
    row = env.measure({"domain": "mock"})
    assert row["reset_ms"] > 0 and 0 < row["score_ms"] <= row["score_p99_ms"]
    rows = [{**row, "domain": domain} for domain in env.DOMAINS]
    assert {bar["bar"].split(":")[0] for bar in env.bars(rows)} == {"telecom", "retail", "airline"}
    missed = env.table([{**row, "domain": "airline", f"live_{env.LIVE}_mb": 51.0}])
    assert f"airline: {env.LIVE} live environments, MB" in missed and "MISSED" in missed
    assert "refused: too large" in env.table([{"domain": "retail", "refused": "too large"}])
