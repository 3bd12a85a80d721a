"""The loop on one screen: draw tasks, roll out groups, rows, advantages, update, validate, checkpoint.

tasks ──► environments ──► rollout ──► method ──► learner ──► new weights ──┐
                              ▲                                             │
                              └─────────────────────────────────────────────┘
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from sinkflex.build import make_learner
from sinkflex.config import Config, LearnerConfig
from sinkflex.demonstrations import demonstrations, played, stage
from sinkflex.learner.losses import LossInputs, aggregate
from sinkflex.learner.rows import beginning, rows_of
from sinkflex.learner.step import Needs
from sinkflex.methods.hooks import Services
from sinkflex.rollout.rewards import reward
from sinkflex.rollout.scripted import encode
from sinkflex.run import Run, open_run
from sinkflex.seeds import generator
from sinkflex.tasks.sampling import Draw
from sinkflex.trajectory import Group, Outcome, Row, write_trajectories


def train(config: Config, interrupted: Callable[[], bool] = lambda: False) -> Run:
    """Train a recipe to its end, continuing where its run directory stands.

    Args:
        config: the recipe.
        interrupted: asked after every step; True saves a checkpoint and raises KeyboardInterrupt.

    Returns:
        The finished run.
    """
    run = open_run(config)
    with run:
        if run.step < 0:
            warm_start(run, interrupted)
            run.step, run.unlogged = 0, {}
        if run.unlogged is not None:
            conclude(run, interrupted)
        scorer = run.scorer()
        needs = Needs(
            run.method.needs_entropy,
            scorer.model("reference") if run.method.needs_reference else None,
            proximal=run.method.options.correction != "none",
            candidates=run.method.needs_candidates,
        )
        while run.step < config.train.steps:
            started = time.perf_counter()
            # Draw tasks and roll out groups with the current weights.
            draws = run.tasks.draw(config.rollout.groups, run.step)
            task_ids = [draw.task_id for draw in draws]
            groups, facts = run.rollout(task_ids, config.rollout.group_size, "train", config.rollout.temperature)
            reward(groups, run.method, run.workers, config.method.reward_seconds)
            run.require_valid(groups, f"step {run.step + 1}")
            rolled_out = time.perf_counter()
            # Score: what was sampled becomes rows with advantages, and with what other models say.
            trained = with_replays(groups, draws)
            rows = rows_of(trained, [run.method.advantages(group) for group in trained])
            run.method.score(trained, rows, scorer)
            scored = time.perf_counter()
            # Update: one optimizer step a mini-batch of whole groups.
            run.metrics.doing("updating")
            if needs.proximal and config.learner.epochs * config.learner.mini_batches > 1:
                run.learner.recompute(rows)
            updates = []
            for part in mini_batches(rows, config.learner.mini_batches) * config.learner.epochs:
                if updates:
                    run.method.rescore(part, scorer)
                updates.append(run.learner.update(part, run.method.loss, needs, run.method.options.count_zero_groups))
            updated = time.perf_counter()
            run.step += 1
            run.tasks.observe(groups, draws)
            values = {**rollout_metrics(groups), **sampler_metrics(facts), **update_metrics(updates)}
            values |= run.tasks.metrics()
            run.method.after_step(groups, values, Services(run.step, run.directory, scorer))
            write_trajectories(run.directory / "trajectories" / f"step_{run.step}.jsonl.zst", groups)
            values |= timing(facts, started, rolled_out, scored, updated)
            run.unlogged = values
            conclude(run, interrupted)
    return run


def conclude(run: Run, interrupted: Callable[[], bool]) -> None:
    """Validate, log and checkpoint a step whose update is done."""
    config, values = run.config.train, run.unlogged
    assert values is not None
    first, last = run.step == 0, run.step == config.steps
    due = first or last or (config.validate_every > 0 and run.step % config.validate_every == 0)
    score = None
    if due:
        score, found = validate(run, last)
        values = values | found
    run.metrics.log("train", run.step, values)
    run.unlogged = None
    stop = not first and interrupted()
    if first or last or stop or run.step % config.checkpoint_every == 0:
        run.save(score)
    if stop:
        raise KeyboardInterrupt(f"step {run.step} is saved")


def warm_start(run: Run, interrupted: Callable[[], bool]) -> None:
    """Supervised training on the scripted expert's episodes (nothing while warmup.steps is 0).

    It leaves no checkpoint before its end: an interrupted one starts again.
    """
    warmup = run.config.warmup
    if warmup.steps:
        run.metrics.doing("playing demonstrations")
        episodes = [encode(d, run.chat, run.config.rollout.max_tokens) for d in demonstrations(run.config)]
        played.cache_clear()  # their ids are enough from here on
        groups = [Group(t.task_id, [t]) for t in episodes]
        rows = rows_of(groups, [[np.ones(t.sampled_tokens, np.float32)] for t in episodes])
        options = LearnerConfig(
            learning_rate=warmup.learning_rate,
            schedule="cosine",
            warmup_steps=min(10, warmup.steps),
            micro_batch_tokens=run.config.learner.micro_batch_tokens,
            checkpoint_layers=run.config.learner.checkpoint_layers,
        )
        learner = make_learner(run.config, run.policy, options, warmup.steps)
        limits, seen = (0, 0), rows
        for step in range(1, warmup.steps + 1):
            run.metrics.doing("warm start", step, warmup.steps)
            rng = generator(run.config.run.seed, "warmup", step)
            if (now := stage(run.config.env.domain, (step - 1) / warmup.steps)) != limits:
                parts = [beginning(row, now[0]) for row in rows if len(row) <= now[1]]
                limits, seen = now, [part for part in parts if len(part)] or rows
            batch, tokens = [], 0
            for index in rng.permutation(len(seen)).tolist():
                batch.append(seen[index])
                tokens += len(seen[index])
                if tokens >= warmup.batch_tokens:
                    break
            values = learner.update(batch, likelihood, Needs(), count_zero_groups=True)
            names = ("loss", "gradient_norm", "learning_rate")
            run.metrics.log("warmup", step, {f"warmup/{name}": values[name] for name in names})
            if interrupted():
                raise KeyboardInterrupt("the warm start will begin again")
    run.policy.save(run.directory / "warm_start")


def likelihood(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood per token: the supervised loss."""
    return -aggregate(inputs.policy_logprobs, inputs, "token_mean"), {}


def validate(run: Run, last: bool) -> tuple[float, dict[str, float]]:
    """Score the current weights; return the score and what goes into the record of this step."""
    config = run.config.validation
    started = time.perf_counter()
    score, groups = run.score(config.split, config.trials, config.temperature)
    values = {"validation/mean@1": score["mean@1"], "validation/invalid": sum(score["invalid"].values())}
    write_trajectories(run.directory / "trajectories" / f"validation_{run.step}.jsonl.zst", groups)
    if last or run.step == 0:
        for name in config.extra:
            extra, _ = run.score(name, config.trials, config.temperature)
            if extra["mean@1"] is not None:
                values[f"validation/{name}/mean@1"] = extra["mean@1"]
    values["timing/validation_seconds"] = time.perf_counter() - started
    return score["mean@1"], values


def with_replays(groups: Sequence[Group], draws: Sequence[Draw]) -> list[Group]:
    """Return the groups with the earlier episodes that join them as further members."""
    return [Group(g.task_id, [*g.members, *draw.replays]) for g, draw in zip(groups, draws, strict=True)]


def mini_batches(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Split rows into `count` parts by whole groups, in the order of the groups."""
    indices = sorted({row.group_index for row in rows})
    parts = [set(part.tolist()) for part in np.array_split(np.array(indices), count)]
    return [[row for row in rows if row.group_index in part] for part in parts if part]


def sampler_metrics(facts: Mapping[str, float]) -> dict[str, float]:
    """Return how much of a rollout was computed, copied, guessed wrong and begun again."""
    tokens = {f"rollout/{name}_tokens": facts[name] for name in ("prefilled", "copied", "rejected")}
    return {**tokens, **({"rollout/retried": facts["retried"]} if facts["retried"] else {})}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return what a rollout phase says about itself."""
    episodes = [t for group in groups for t in group.members]
    valid = [t for t in episodes if t.valid]
    rewards = [float(t.reward or 0.0) for t in valid]
    turns = [turn for t in valid for turn in t.turns]
    values: dict[str, float] = {
        "rollout/episodes": len(episodes),
        "rollout/invalid": len(episodes) - len(valid),
        "rollout/sampled_tokens": sum(t.sampled_tokens for t in valid),
        "reward/varied_groups_fraction": float(np.mean([len({t.reward for t in g.valid}) > 1 for g in groups])),
    }
    if lone := sum(len(g.valid) < 2 <= len(g.members) for g in groups):
        values["rollout/lone_groups"] = lone
    faults = Counter(str(t.stop_reason) for t in episodes if not t.valid)
    values |= {f"rollout/invalid/{kind}": count for kind, count in sorted(faults.items())}
    if valid:
        values |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/solved_fraction": float(np.mean([t.outcome is Outcome.SOLVED for t in valid])),
            "rollout/turns_mean": len(turns) / len(valid),
            "rollout/parse_errors_fraction": float(np.mean([turn.action.error is not None for turn in turns])),
        }
        parts: dict[str, list[float]] = {}
        for t in valid:
            for name, value in t.reward_parts.items():
                parts.setdefault(name, []).append(value)
        values |= {f"reward/part/{name}": float(np.mean(part)) for name, part in sorted(parts.items())}
        stops = Counter(str(t.stop_reason) for t in valid)
        values |= {f"rollout/stop/{name}": count / len(valid) for name, count in sorted(stops.items())}
    return values


def update_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the records of a step's updates: sums of counts and loss, maxima, last learning rate, else means."""
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        column = [update[name] for update in updates if name in update]
        if name in ("loss", "tokens", "row_tokens", "unique_tokens"):
            values[f"learner/{name}"] = sum(column)
        elif name.endswith("_max"):
            values[f"learner/{name}"] = max(column)
        else:
            values[f"learner/{name}"] = column[-1] if name == "learning_rate" else float(np.mean(column))
    return values


def timing(
    facts: Mapping[str, float], started: float, rolled_out: float, scored: float, updated: float
) -> dict[str, float]:
    """Return where the time of a step went. A pass of the sampler does two things at once: its time goes by tokens."""
    prompts, answers = facts["prefilled"], facts["sampled"] + facts["rejected"]
    return {
        "timing/rollout_seconds": rolled_out - started,
        "timing/environment_seconds": facts["environment"],
        "timing/prefill_seconds": facts["sampler"] * prompts / max(prompts + answers, 1),
        "timing/decode_seconds": facts["sampler"] * answers / max(prompts + answers, 1),
        "timing/score_seconds": scored - rolled_out,
        "timing/update_seconds": updated - scored,
        "timing/step_seconds": time.perf_counter() - started,
        "timing/peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Return the largest memory of the process so far, or of the GPU if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rise if sys.platform == "darwin" else rise * 1024
