from __future__ import annotations

import json
from collections import Counter

import numpy as np
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
    draws = [draw.task_id for step in range(8) for draw in tasks.draw(3, step)]
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
    drawn = Counter(int(d.task_id[1:]) % 2 for step in range(100) for d in tasks.draw(10, step))
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


def solved(task_id: str, successes: int, size: int = 8) -> Group:
    """A group with so many successes in front."""
    members = [
        Trajectory(
            task_id,
            i,
            [],
            Outcome.SOLVED if i < successes else Outcome.FAILED,
            StopReason.USER_STOP,
            float(i < successes),
            seed=i,
        )
        for i in range(size)
    ]
    return Group(task_id, members)


def dtac(**options: object) -> TaskSampler:
    return sampler("dtac", **{"bucket": ("task_id",), "ema": 1.0, **options})


def test_a_rare_success_is_replayed_in_a_fresh_group_a_fixed_number_of_times() -> None:
    tasks = dtac(replay_uses=2)
    tasks.observe([solved("t3", 1), solved("t4", 4), solved("t5", 0)])
    seen = []
    for step in range(1, 5):
        draws = tasks.draw(8, step)
        seen.append([(d.task_id, [t.reward for t in d.replays]) for d in draws if d.channel == "replay"])
        tasks.observe([], draws)
    once = [("t3", [1.0])]
    assert seen == [once, once, [], []], "t4 succeeds too often and t5 never: only t3 is in the band"


def test_a_success_leaves_when_its_task_leaves_the_band_and_waits_for_its_return() -> None:
    tasks = dtac()
    tasks.observe([solved("t3", 1)])
    tasks.observe([solved("t3", 8)])
    assert not any(d.replays for d in tasks.draw(8, 2))
    tasks.observe([solved("t3", 1)])
    assert sum(len(d.replays) for d in tasks.draw(8, 3)) == 1


def test_replays_are_at_most_their_share_of_the_groups() -> None:
    tasks = dtac()
    tasks.observe([solved(f"t{i}", 1) for i in range(12)])
    assert Counter(d.channel for d in tasks.draw(8, 1)) == {"fresh": 6, "replay": 2}
    assert tasks.metrics()["tasks/stored"] == 12


def test_the_infeasible_share_is_exact_over_steps() -> None:
    impossible = [TaskSpec("telecom", f"x{i}", {}) for i in range(3)]
    config = TasksConfig(sampling="dtac", infeasible_share=0.05)
    tasks = TaskSampler(TASKS, config, 0, impossible)
    channels = Counter(d.channel for step in range(50) for d in tasks.draw(14, step))
    assert channels == {"fresh": 665, "infeasible": 35}
    assert all(sum(d.channel == "infeasible" for d in tasks.draw(14, step)) <= 1 for step in range(50))
    assert "tasks/infeasible_recognized" not in tasks.metrics()
    tasks.observe([solved("x1", 6), solved("t0", 1)])
    assert tasks.metrics()["tasks/infeasible_recognized"] == 0.75


def test_dtac_follows_the_frontier_and_probes_a_task_that_fell_to_zero() -> None:
    rng = np.random.default_rng(0)
    pool = [TaskSpec("telecom", f"t{i}", {}) for i in range(60)]
    tasks = TaskSampler(pool, TasksConfig(sampling="dtac", bucket=("task_id",)), 0)
    level, drawn = -5.0, Counter()
    for step in range(300):
        level += 0.15  # the policy improves: task i is solved with probability sigmoid(level - i)
        groups = []
        for draw in tasks.draw(10, step):
            chance = 1 / (1 + np.exp(-(level - int(draw.task_id[1:]))))
            groups.append(solved(draw.task_id, int(rng.binomial(8, chance))))
            if step >= 150:
                drawn[abs(int(draw.task_id[1:]) - level) < 8] += 1
        tasks.observe(groups)
    assert drawn[True] > 2 * drawn[False], "the frontier, a quarter of the tasks, gets most groups"
    assert tasks.pass_rate["t59"] < 0.2
    for _ in range(20):
        tasks.observe([solved("t59", 0)])
    assert tasks.pass_rate["t59"] < 0.01
    assert any(d.task_id == "t59" for step in range(300, 900) for d in tasks.draw(10, step))


def test_tasks_outside_the_band_are_left_out_until_they_are_measured_anew() -> None:
    tasks = sampler(recalibrate_every=3)
    tasks.observe([solved("t3", 0), solved("t4", 8), solved("t5", 4), solved("t6", 0, size=4)])
    assert tasks.left_out() == {"t3", "t4"}, "t6 has too few episodes for a verdict"
    assert not {"t3", "t4"} & {d.task_id for step in range(100) for d in tasks.draw(10, step)}
    row = next(r for r in tasks.calibration() if r["task_id"] == "t3")
    assert row["episodes"] == 8 and row["pass_rate"] == 0 and row["interval"][1] == pytest.approx(0.324, abs=1e-3)
    tasks.observe([])
    tasks.observe([])
    assert tasks.left_out() == set() and sampler().left_out() == set()


def test_the_state_of_dtac_survives_a_checkpoint() -> None:
    before, after = dtac(recalibrate_every=9), dtac(recalibrate_every=9)
    before.observe([solved("t3", 1), solved("t7", 0)])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.draw(8, 3) == before.draw(8, 3)
    assert after.metrics() | {"tasks/replays": 0} == before.metrics() and after.left_out() == {"t3", "t7"} - {"t3"}


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
