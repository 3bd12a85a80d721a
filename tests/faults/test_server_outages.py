"""The user's server is away for a third of a run: no failure is counted, and what ran is what a clean run has."""

from __future__ import annotations

import itertools
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from disturbed import require_equal, small

from sinkflex.config import Config
from sinkflex.run import Outage, Run
from sinkflex.train import train
from sinkflex.trajectory import Trajectory, read_trajectories
from tests.users.scripted_server import Served, raw, says, serving

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def served(server: Served, directory: Path, *overrides: str) -> Config:
    """A run that talks to the server, and takes its first fault for the last word."""
    endpoint = (f"env.endpoint.base_url={server.url}", "env.endpoint.model=m", "env.endpoint.retries=0")
    return small(directory, "env.user=endpoint", *endpoint, "rollout.retries=0", f"train.steps={STEPS}", *overrides)


def episodes(directory: Path) -> dict[tuple[str, str, int], Trajectory]:
    """All episodes by file, group and member."""
    return {
        (path.name, f"{i} {group.task_id}", t.member): t
        for path in sorted((directory / "trajectories").iterdir())
        for i, group in enumerate(read_trajectories(path))
        for t in group.members
    }


def what_happened(t: Trajectory) -> tuple[Any, ...]:
    """All but log-probs: their last bits depend on what else is in the sampler's batch."""
    turns = [(turn.prompt_ids, turn.action_ids, turn.observation) for turn in t.turns]
    return t.outcome, t.stop_reason, t.reward, t.reward_parts, t.record, turns


def test_a_run_whose_server_was_away_for_two_of_six_steps_equals_a_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Served([says("Hello.")])
    train(served(server, tmp_path / "whole"))
    rollout, away = Run.rollout, {2, 3}

    def with_outages(run: Run, task_ids: list[str], size: int, purpose: str, *rest: Any, **named: Any) -> Any:
        if purpose == "train" and run.step in away:
            server.stop()
        return rollout(run, task_ids, size, purpose, *rest, **named)

    monkeypatch.setattr(Run, "rollout", with_outages)
    stopped = 0
    try:
        while away:
            with pytest.raises(Outage, match=r"8 of 8 episodes of step \d are invalid.*same command again"):
                train(served(server, tmp_path / "run"))
            stopped += 1
            if stopped % 2 == 0:  # the command is given twice while the server is away
                away.remove(1 + stopped // 2)
                server = Served([says("Hello.")], port=server.port)
        train(served(server, tmp_path / "run"))
    finally:
        server.stop()
    assert stopped == 4
    require_equal(tmp_path / "run", tmp_path / "whole", STEPS)
    assert all(t.valid for t in episodes(tmp_path / "run").values())


def test_what_ran_beside_a_third_of_lost_episodes_is_what_a_clean_run_has(tmp_path: Path) -> None:
    same_weights = "learner.learning_rate=1e-30"
    with serving(says("Hello.")) as server:
        train(served(server, tmp_path / "whole", same_weights))
    conversations = itertools.count()

    def respond(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        lost = len(body["messages"]) == 2 and next(conversations) % 3 == 2
        (raw(b"overloaded", 503) if lost else says("Hello."))(handler, body)

    with serving(respond) as server:
        train(served(server, tmp_path / "run", same_weights))
    clean, found = episodes(tmp_path / "whole"), episodes(tmp_path / "run")
    assert clean.keys() == found.keys()
    ran = {key: t for key, t in found.items() if t.valid}
    assert 0.3 < 1 - len(ran) / len(found) < 0.37
    assert [key for key, t in ran.items() if what_happened(t) != what_happened(clean[key])] == []
    assert all(t.reward is None and t.turns == [] for key, t in found.items() if key not in ran)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"]:
            ours = [t for (name, *_), t in ran.items() if name == f"step_{record['step']}.jsonl.zst"]
            assert record["rollout/invalid"] == record["rollout/invalid/user_fault"] == 8 - len(ours)
            assert record["reward/mean"] == sum(t.reward or 0.0 for t in ours) / len(ours)
