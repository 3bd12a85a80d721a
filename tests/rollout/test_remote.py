"""Environments in workers: the reward function of one's own environment has the deadline too."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sinkflex.envs.env import Action, DeadlineFault, EnvironmentFault, MemoryFault
from sinkflex.envs.prompts import PromptEnv
from sinkflex.rollout.deadline import Nursery
from sinkflex.rollout.remote import RemoteEnv


def judge(answer: str, example: Mapping[str, Any]) -> float:
    if answer == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "eat":
        kept = [b""]
        while kept:
            kept.append(b"x" * 10_000_000)
    return float(answer == example["answer"])


def sums(path: str) -> PromptEnv:
    return PromptEnv({"train": path}, judge)


@pytest.mark.parametrize(("answer", "fault"), [("hang", DeadlineFault), ("eat", MemoryFault)])
def test_a_reward_function_has_the_limits_of_its_environment(
    answer: str, fault: type[EnvironmentFault], tmp_path: Path
) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "2 + 3?", "answer": "5"}')
    with Nursery(memory_bytes=500_000_000) as nursery:
        env = RemoteEnv(nursery, 2.0 if answer == "hang" else 60.0, {"user": "none"}, sums, str(path))
        for said in (answer, "5"):
            env.reset(seed=0, options={"task_id": "train/1"})  # type: ignore[attr-defined]
            started = time.monotonic()
            if said == "5":
                assert env.step(Action(said))[1:3] == (1.0, True)  # type: ignore[attr-defined]
            else:
                with pytest.raises(fault) as error:
                    env.step(Action(said))  # type: ignore[attr-defined]
                assert error.value.info == {"user": "none"}
                assert time.monotonic() - started < (2 + 1 if answer == "hang" else 30)
