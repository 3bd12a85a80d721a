"""ToolsRL: the F1 of calls by hand and by counting, the two phases, and GRPO without them."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sinkflex.envs.env import Action, ToolCall
from sinkflex.methods.method import build_method
from sinkflex.methods.toolsrl import ToolsRL, call_f1
from sinkflex.tasks.gold import gold_calls
from sinkflex.train import reward, train
from sinkflex.trajectory import Group, Trajectory
from tests.methods.episodes import episode, turn
from tests.methods.small_run import records, services, small

TASK = "[mms_issue]bad_network_preference|user_abroad_roaming_disabled_off[PERSONA:None]"
LOOK, WRITE = ToolCall("check_network_status"), ToolCall("toggle_data")


def toolsrl(**options: Any) -> ToolsRL:
    method = build_method("toolsrl", options, 100)
    assert isinstance(method, ToolsRL)
    return method


def gold() -> list[ToolCall]:
    return list(gold_calls("telecom", TASK))


def paid(method: ToolsRL, t: Trajectory) -> float:
    return asyncio.run(method.reward(t)).total


def test_f1_by_hand_weighs_a_missed_call_ten_times_an_extra_one_and_changes_above_looks() -> None:
    a, b, c = gold()
    options = toolsrl().options
    assert call_f1("telecom", [a, b, c], gold(), options) == 1.0
    assert call_f1("telecom", [c, a, b], gold(), options) == 1.0
    assert call_f1("telecom", [a, b], gold(), options) == pytest.approx(4 / (4 + 1))
    assert call_f1("telecom", [a, b, c, WRITE], gold(), options) == pytest.approx(6 / (6 + 0.1))
    assert call_f1("telecom", [a, b, c, LOOK], gold(), options) == pytest.approx(6 / (6 + 0.1 * 0.25))
    assert call_f1("telecom", [a, a], gold(), options) == pytest.approx(2 / (2 + 0.1 + 2))
    assert call_f1("telecom", [a, b, c, ToolCall("done")], gold(), options) == 1.0
    assert call_f1("telecom", [], gold(), options) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_with_equal_weights_it_is_the_plain_f1_of_two_bags(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ["toggle_data", "toggle_roaming", "check_network_status", "toggle_airplane_mode"]
    made, wanted = ([names[i] for i in rng.integers(0, 4, rng.integers(1, 7))] for _ in range(2))
    both = (Counter(made) & Counter(wanted)).total()
    precision, recall = both / len(made), both / len(wanted)
    plain = 2 * precision * recall / (precision + recall) if both else 0.0
    options = toolsrl(extra_weight=1.0, missed_weight=1.0, read_weight=1.0).options
    assert call_f1("telecom", [ToolCall(n) for n in made], [ToolCall(n) for n in wanted], options) == pytest.approx(
        plain
    )


def test_the_tool_reward_is_the_mean_of_the_best_and_the_last_score() -> None:
    a, b, c = gold()
    t = episode([turn(1, [a]), turn(1, [b, c]), turn(1, [WRITE]), turn(1, [WRITE])], task_id=TASK)
    assert toolsrl().tool_reward(t) == pytest.approx((1.0 + 6 / 6.2) / 2)


def test_the_first_phase_pays_calls_and_the_second_the_task() -> None:
    a, b, c = gold()
    right = episode([turn(1, [a, b, c])], 0.0, 0, TASK)
    lucky = episode([turn(1, text="Hello.")], 1.0, 1, TASK)
    method = toolsrl(tool_steps=2, format_weight=0.0)
    seen = []
    for _ in range(3):
        seen.append((paid(method, right), paid(method, lucky)))
        method.after_step([], {}, services())
    assert seen == [(1.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    parts = asyncio.run(method.reward(right)).parts
    assert (parts["tool"], parts["task"], parts["format"]) == (1.0, 0.0, 1.0)


def test_unreadable_turns_cost_the_format_in_both_phases_and_mixing_adds_up() -> None:
    a, b, c = gold()
    broken = turn(1)
    broken.action = Action(error="no call")
    t = episode([turn(1, [a, b, c]), broken], 1.0, 0, TASK)
    assert paid(toolsrl(tool_steps=1), t) == paid(toolsrl(tool_steps=0), t) == pytest.approx(1 + 0.1 * 0.5)
    assert paid(toolsrl(mixed=True, format_weight=0.0), t) == 2.0


def test_the_phase_survives_a_stop() -> None:
    method, other = toolsrl(tool_steps=1), toolsrl(tool_steps=1)
    method.after_step([], {}, services())
    other.load_state_dict(method.state_dict())
    t = episode([turn(1, text="Hello.")], 1.0, 0, TASK)
    assert paid(other, t) == paid(method, t) == pytest.approx(1.1)


def test_without_phase_and_format_it_is_grpo_to_the_bit() -> None:
    def episodes() -> Group:
        return Group(TASK, [episode([turn(2, gold()[:i])], float(i % 2), i, TASK) for i in range(4)])

    plain, off = episodes(), episodes()
    reward([off], toolsrl(tool_steps=0, format_weight=0.0))
    grpo = build_method("grpo", {}, 100)
    assert [t.reward for t in off.members] == [t.reward for t in plain.members]
    for mine, its in zip(toolsrl().advantages(off), grpo.advantages(plain), strict=True):
        assert mine.tobytes() == its.tobytes()


def test_a_task_without_gold_calls_pays_the_task_in_both_phases() -> None:
    t = episode([turn(1)], 1.0, 0, "t")
    t.domain, t.task_id = "retail", "24"
    assert not gold_calls("retail", t.task_id)
    assert paid(toolsrl(tool_steps=5, format_weight=0.0), t) == 1.0


def test_it_trains_and_the_reward_changes_with_the_phase(tmp_path: Path) -> None:
    telecom = ("env.domain=telecom", "env.solo=true", "tasks.split=train", "validation.split=test", "warmup.steps=2")
    train(small(tmp_path, "toolsrl", *telecom, "method.tool_steps=1", "method.format_weight=0"))
    first, second = records(tmp_path)
    assert first["reward/mean"] == pytest.approx(first["reward/part/tool"])
    assert second["reward/mean"] == pytest.approx(second["reward/part/task"])
