"""SEED's first stage (arXiv 2607.14777): a policy learns to write lessons about its own episodes.

    python benchmarks/hindsight.py recipes/seed.toml --out runs/analyst
    sinkflex train recipes/seed.toml --set model.path=runs/analyst --set warmup.steps=0 --set method.analyzer=policy

Rolls out training tasks with the policy of the recipe's warm start, lets the scripted rule write a lesson about each
episode, and trains the policy on these texts. The paper takes 180 tasks of 8 episodes, a large model's lessons and 3
epochs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from sinkflex.build import make_learner
from sinkflex.config import LearnerConfig
from sinkflex.learner.rows import rows_of
from sinkflex.learner.step import Needs
from sinkflex.methods.lessons import by_rule, demonstration
from sinkflex.recipe import load_config
from sinkflex.run import open_run
from sinkflex.seeds import generator
from sinkflex.tasks.suites import training_tasks
from sinkflex.train import likelihood, train
from sinkflex.trajectory import Group


def main() -> None:
    """Make the policy that can write lessons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the policy; its run is beside it")
    parser.add_argument("--tasks", type=int, default=180)
    parser.add_argument("--episodes", type=int, default=8, help="of each task")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="lessons of one update")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, [*arguments.set, "train.steps=0", f"run.directory={arguments.out}_run"])
    train(config)
    with open_run(config) as run:
        tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
        picks = generator(config.run.seed, "hindsight").permutation(len(tasks))[: arguments.tasks]
        task_ids = [tasks[i].task_id for i in picks.tolist()]
        groups, _ = run.rollout(task_ids, arguments.episodes, "rollout", config.rollout.temperature)
        episodes = [demonstration(t, by_rule(t), run.chat) for group in groups for t in group.valid]
        rows = rows_of(
            [Group(t.task_id, [t]) for t in episodes], [[np.ones(t.sampled_tokens, np.float32)] for t in episodes]
        )
        updates = arguments.epochs * -(-len(rows) // arguments.batch)
        options = LearnerConfig(learning_rate=arguments.learning_rate, schedule="cosine", checkpoint_layers=False)
        learner = make_learner(config, run.policy, options, updates)
        for epoch in range(arguments.epochs):
            order = generator(config.run.seed, "hindsight", epoch).permutation(len(rows)).tolist()
            for start in range(0, len(order), arguments.batch):
                batch = [rows[i] for i in order[start : start + arguments.batch]]
                found = learner.update(batch, likelihood, Needs(), count_zero_groups=True)
            print(f"epoch {epoch + 1}: loss {found['loss']:.3f}")
        run.policy.save(arguments.out)


if __name__ == "__main__":
    main()
