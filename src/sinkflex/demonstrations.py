"""What the warm start learns from: a scripted expert on the train tasks, and the texts of a new tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from sinkflex.build import make_env
from sinkflex.config import Config
from sinkflex.envs.tau2 import practice
from sinkflex.envs.tau2.tasks import read
from sinkflex.policy.clerk import ClerkAgent
from sinkflex.policy.sweep import SweepAgent
from sinkflex.rollout.scripted import Agent, Dialogue, play
from sinkflex.seeds import generator, seed_for
from sinkflex.tasks.suites import scored_tasks, training_tasks
from sinkflex.users.retail import KINDS

EVERYTHING = 10**9
# What the warm start shows: up to a share of its steps, so many turns of the episodes of no more than so many tokens.
# In retail ids have to be copied, which is learned where there are few of them.
STAGES = {"retail": ((0.15, 3, EVERYTHING), (1.0, EVERYTHING, 1100))}


def stage(domain: str, done: float) -> tuple[int, int]:
    """Return how many turns the warm start shows of an episode, and how many tokens an episode may have.

    Args:
        domain: of the environment.
        done: share of the steps that is behind.
    """
    stages = STAGES.get(domain, ())
    return next(((turns, longest) for share, turns, longest in stages if done < share), (EVERYTHING, EVERYTHING))


def demonstrations(config: Config) -> list[Dialogue]:
    """Let the scripted expert play the warm start's train tasks; the run's seed decides which and how.

    In retail, where it plays a task in one way only, the other episodes have practice customers who get what they want.
    The last ones are kept, since a tokenizer and the warm start of a run want the same: `played.cache_clear()` ends it.
    """
    return played(config.model_dump_json())


@lru_cache(maxsize=1)
def played(recipe: str) -> list[Dialogue]:
    """Play the demonstrations of a recipe, given as JSON."""
    config = Config.model_validate_json(recipe)
    warmup, seed = config.warmup, config.run.seed
    train = scored_tasks(config.env.domain, "train")
    if warmup.demonstrations > len(train):
        raise ValueError(f"warmup.demonstrations is {warmup.demonstrations}, but there are {len(train)} train tasks")
    picks = generator(seed, "demonstrations").permutation(len(train))[: warmup.demonstrations]
    env = make_env(config, offline=True)
    agent = expert(config)
    repeats = 1 if config.env.domain == "retail" else warmup.repeats
    episodes = [
        play(env, agent, train[int(i)].task_id, seed_for(seed, "demonstration", int(i), repeat))
        for i in picks
        for repeat in range(repeats)
    ]
    others = (practice.name(seed, number) for number in range(len(picks) * (warmup.repeats - repeats)))
    return [*episodes, *filter(fulfilled, (play(env, agent, name, seed=0) for name in others))]


def fulfilled(dialogue: Dialogue) -> bool:
    """True if a practice customer got all they want: each change was made, by a call that succeeded."""
    task = read("retail", dialogue.task_id)
    assert task.evaluation_criteria is not None
    wishes = sorted(action.name for action in task.evaluation_criteria.actions or ())
    made = sorted(c.name for action, _ in dialogue.exchanges for c in action.tool_calls if c.name in KINDS)
    failed = any(message.error for _, observation in dialogue.exchanges for message in observation)
    return dialogue.reward == 1.0 and made == wishes and not failed


def expert(config: Config) -> Agent:
    """Return the scripted expert of the recipe's domain; none of them reads the gold actions.

    Raises:
        ValueError: the domain has none.
    """
    env, warmup, seed = config.env, config.warmup, config.run.seed
    if env.domain == "telecom":
        return SweepAgent(seed, warmup.omit, warmup.forget, warmup.diagnose, warmup.shuffle, solo=env.solo)
    if env.domain == "retail" and not env.solo:
        return ClerkAgent(seed, warmup.omit)
    where = f"{env.domain} in solo" if env.solo else env.domain
    raise ValueError(f"warmup: there is no scripted expert for {where}; use --set warmup.steps=0")


def corpus(config: Config) -> Iterator[str]:
    """Yield the texts a new tokenizer is trained on: prompt, tools and demonstrations, or the train tasks' openings."""
    env = make_env(config, offline=True)
    yield env.policy
    for tool in env.tools:
        yield str(tool)
    if config.warmup.steps:
        dialogues = demonstrations(config)
    else:
        dialogues = [
            Dialogue(t.task_id, 0, env.reset(seed=0, options={"task_id": t.task_id})[0], [], 0.0, {})
            for t in training_tasks(config.env.domain, config.tasks.split)
        ]
    for dialogue in dialogues:
        yield from (message.content for message in dialogue.opening)
        for action, observation in dialogue.exchanges:
            yield action.text or ""
            for call in action.tool_calls:
                yield f"{call.name} {dict(call.arguments)}".replace("'", '"')
            yield from (message.content for message in observation)
