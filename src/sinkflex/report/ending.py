"""What a person must know at the end of a run, and no number on the way says aloud."""

from __future__ import annotations

import json
import shlex
from typing import Any

from sinkflex.run import Run
from sinkflex.scores import faults_text
from sinkflex.trajectory import read_trajectories


def remarks(run: Run) -> list[str]:
    """Return sentences on a finished run: it had no work left, its weights never changed, its episodes were invalid.

    They go by the run's own records, of all its steps, so that a run without the writer "jsonl" gets the first alone.
    """
    wanted = run.config.train.steps
    if run.before is None:  # nothing was rolled out
        return [
            f"nothing was done: {run.directory} is at step {run.step}, and train.steps = {wanted}. Type "
            f"--set train.steps={run.step + max(wanted, 10)} to go on, or --set run.directory=FOLDER for another run"
        ]
    path = run.directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    records = [record for record in records if record["stage"] == "train"]
    return [text for text in (_invalid(run, records), _unmoved(run, records)) if text]


def _unmoved(run: Run, records: list[dict[str, Any]]) -> str:
    steps = [record for record in records if record["step"] > 0]
    if not steps or len(steps) < run.step or any(record.get("learner/gradient_norm") for record in steps):
        return ""  # some step moved them, or has no record
    rewards = [record["reward/mean"] for record in steps if "reward/mean" in record]
    mean = f" (mean reward {sum(rewards) / len(rewards):.3g})" if rewards else ""
    episodes = run.directory / "trajectories" / f"step_{run.step}.jsonl.zst"
    return (
        f"the weights did not change: in none of {len(steps)} steps did the rewards of a group differ{mean}, and "
        "nothing else taught. Give the policy tasks that it solves now and then: a longer warm start (--set "
        "warmup.steps=N), more episodes of a task (--set rollout.group_size=N), or a reward that pays for parts. Type "
        f"sinkflex export {shlex.quote(str(episodes))} --to text to read what it did"
    )


def _invalid(run: Run, records: list[dict[str, Any]]) -> str:
    """Return how many episodes were invalid, and the commonest cause in the last step that had any."""
    counted = [
        (record["step"], kind, record[name])
        for record in records
        for kind, name in (("validation", "validation/invalid"), ("step", "rollout/invalid"))
        if record.get(name)
    ]
    if not counted:
        return ""
    step, kind, _ = counted[-1]
    path = run.directory / "trajectories" / f"{kind}_{step}.jsonl.zst"
    total = sum(int(count) for _, _, count in counted)
    # The file may be tidied away.
    cause = f"; of {kind} {step}: {faults_text(read_trajectories(path))}" if path.is_file() else ""
    return f"{total} episodes of the run were invalid{cause}"
