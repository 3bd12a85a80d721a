from __future__ import annotations

from collections import Counter

import pytest

from sinkflex.config import TasksConfig
from sinkflex.envs.env import StopReason
from sinkflex.envs.tau2.tasks import TaskSpec
from sinkflex.tasks.sampling import TaskSampler
from sinkflex.tasks.suites import scored_tasks, training_tasks
from sinkflex.trajectory import Group, Outcome, Trajectory

TASKS = [TaskSpec("telecom", f"t{i}", {"family": "mms" if i % 2 else "service", "faults": i % 3}) for i in range(12)]


def sampler(sampling: str = "variance", **options: object) -> TaskSampler:
    return TaskSampler(TASKS, TasksConfig(sampling=sampling, **options), run_seed=0)


def finished(task_id: str, rewards: list[float | None]) -> Group:
    return Group(
        task_id,
        [
            Trajectory(task_id, i, [], Outcome.INVALID if r is None else Outcome.FAILED, StopReason.USER_STOP, r)
            for i, r in enumerate(rewards)
        ],
    )


def test_uniform_draws_see_every_task_once_an_epoch_in_an_order_that_changes() -> None:
    tasks = sampler("uniform")
    draws = [task for step in range(8) for task in tasks.draw(3, step)]
    first, second = draws[:12], draws[12:]
    assert sorted(first) == sorted(second) == sorted(t.task_id for t in TASKS)
    assert first != second


@pytest.mark.parametrize("sampling", ["uniform", "variance"])
def test_a_draw_depends_on_the_step_and_not_on_earlier_draws(sampling: str) -> None:
    fresh, used = sampler(sampling), sampler(sampling)
    for step in range(5):
        used.draw(4, step)
    assert fresh.draw(4, 5) == used.draw(4, 5)


def test_variance_draws_prefer_buckets_that_are_solved_half_of_the_time() -> None:
    tasks = sampler(bucket=("family",), ema=1.0)
    tasks.observe([finished("t0", [1.0] * 4), finished("t1", [1.0, 0.0, 1.0, 0.0])])
    assert tasks.pass_rate == {"service": 1.0, "mms": 0.5}
    drawn = Counter(int(t[1:]) % 2 for step in range(100) for t in tasks.draw(10, step))
    assert drawn[0] / drawn[1] == pytest.approx(0.02, abs=0.02)
    assert drawn[0] > 0, "a solved bucket is still looked at"


def test_the_pass_rate_is_a_moving_average_over_valid_episodes() -> None:
    tasks = sampler(bucket=("family",), ema=0.5)
    tasks.observe([finished("t0", [1.0, None]), finished("t2", [0.0])])
    assert tasks.pass_rate["service"] == pytest.approx(0.5 + 0.5 * (0.5 - 0.5))
    tasks.observe([finished("t0", [None, None])])
    assert tasks.pass_rate["service"] == pytest.approx(0.5)
    tasks.observe([finished("t1", [1.0])])
    assert tasks.pass_rate["mms"] == pytest.approx(0.75)


def test_the_state_survives_a_checkpoint() -> None:
    before, after = sampler(), sampler()
    before.observe([finished("t0", [1.0])])
    after.load_state_dict(before.state_dict())
    assert after.draw(6, 3) == before.draw(6, 3)
    assert after.pass_rate == before.pass_rate


def test_training_never_sees_a_scored_task_or_its_persona_sibling() -> None:
    def problems(tasks: list[TaskSpec]) -> set[str]:
        return {task.task_id.partition("[PERSONA")[0] for task in tasks}

    held_out, test = scored_tasks("telecom", "held_out"), scored_tasks("telecom", "test")
    assert len(held_out) == 200 and len(test) == 40
    for split in ("train", "pool"):
        pool = training_tasks("telecom", split)
        assert not problems(pool) & problems(held_out)
        assert not problems(pool) & problems(test)
    assert not problems(held_out) & problems(test)
    assert len(training_tasks("telecom", "pool")) > 1500
    assert scored_tasks("telecom", "held_out") == held_out
