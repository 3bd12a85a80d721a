"""Credit: who is compared with whom, what a broken episode counts, and what engine noise does to a loss."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch

from sinkflex.build import make_env
from sinkflex.checks.subject import Broken, Subject
from sinkflex.envs.env import EnvironmentFault
from sinkflex.learner.losses import LossInputs
from sinkflex.learner.rows import rows_of
from sinkflex.rollout.group import Phase, rollout
from sinkflex.trajectory import Group, Outcome, Trajectory

NOISE, LENGTHS, WEIGHT, EPISODES = 0.02, (8_000, 20_000), 0.05, 32


def silent_groups(subject: Subject) -> str:
    """A group of one, and one whose rewards are equal, has advantage 0: there is nothing to compare."""
    method, members = subject.run.method, subject.groups[0].members
    for reward in (0.0, 0.7, 1.0):
        for what, size in (("of one", 1), ("without variance", len(members))):
            values = method.advantages(_rewarded(members[:size], [reward] * size))
            largest = max(float(np.abs(a).max()) for a in values)
            if largest:
                raise Broken(
                    f"a group {what} with reward {reward} has advantages up to {largest:.2g}",
                    "Unless the method means it, let `advantages` return 0 where rewards do not differ.",
                )
    return "groups of one and without variance have advantage 0"


def broken_episodes(subject: Subject) -> str:
    """An episode that a fault ended has no reward, and no say in baseline or loss."""
    run, members = subject.run, subject.groups[0].members
    rewards: list[float | None] = [float(i % 2) for i in range(len(members))]
    without = _rewarded(members[:-1], rewards[:-1])
    with_it = _rewarded(members, [*rewards[:-1], None])
    pairs = [(g, run.method.advantages(g)) for g in (without, with_it)]
    remedy = "Let `advantages` read `group.valid` alone."
    if [a.tolist() for a in pairs[0][1]] != [a.tolist() for a in pairs[1][1]]:
        raise Broken("a broken episode moves the advantages of its siblings", remedy)
    tokens = [sum(int(row.loss_mask.sum()) for row in rows_of([g], [a])) for g, a in pairs]
    if tokens[0] != tokens[1]:
        raise Broken("a broken episode is trained on", remedy)
    phase = Phase("check", run.config.run.seed, 0, 0, 1.0)
    task = subject.groups[0].task_id
    groups, _ = rollout([task], 2, lambda: _Faulty(make_env(run.config, offline=True)), run.chat, run.sampler, phase)
    if any(t.valid or t.reward is not None for t in groups[0].members):
        raise Broken("an episode whose environment failed has a reward", "Raise EnvironmentFault where it fails.")
    return "they have no reward, move no sibling and are not trained on"


def engine_noise(subject: Subject) -> str:
    """Noise of 0.02 a token between sampler and learner leaves the weight of a long episode where it was."""
    method, found = subject.run.method, []
    for tokens in LENGTHS:
        rng = torch.Generator().manual_seed(0)
        noise = NOISE * torch.randn(EPISODES * tokens, generator=rng)
        with_noise, exact = (_pull(method, tokens, x) for x in (noise, torch.zeros(EPISODES * tokens)))
        weight = with_noise / exact
        if not abs(weight - 1) <= WEIGHT:
            raise Broken(
                f"episodes of {tokens} tokens count {weight:.2f} of what they should",
                "A weight is multiplied up over the tokens (average its log over a trajectory, as method.correction "
                '= "trajectory_mask" does), or the clip range is narrower than the noise (method.clip_low, clip_high), '
                "which any method.correction takes out of the ratio.",
            )
        found.append(f"{tokens} tokens: {weight:.3f}")
    return "mean weight at " + ", ".join(found)


def _pull(method: Any, tokens: int, noise: torch.Tensor) -> float:
    """The gradient that episodes of advantage 1 give their log-probs, summed."""
    policy = torch.full((EPISODES * tokens,), -1.0, requires_grad=True)
    still = policy.detach()
    inputs = LossInputs(
        policy_logprobs=policy,
        behavior_logprobs=still + noise,
        advantages=torch.ones(EPISODES * tokens),
        trajectory=torch.arange(EPISODES).repeat_interleave(tokens),
        trajectory_tokens=torch.full((EPISODES * tokens,), tokens),
        tokens=EPISODES * tokens,
        trajectories=EPISODES,
        entropy=policy * 0 if method.needs_entropy else None,
        reference_logprobs=still if method.needs_reference else None,
        proximal_logprobs=still if method.options.correction != "none" else None,
    )
    (gradient,) = torch.autograd.grad(method.loss(inputs)[0], policy)
    return float(gradient.double().sum())


def _rewarded(members: list[Trajectory], rewards: list[float | None]) -> Group:
    """The members with other rewards; None is an episode that a fault ended."""
    made = []
    for member, reward in zip(members, rewards, strict=True):
        made.append(copy(member))
        made[-1].reward = reward
        made[-1].outcome = Outcome.INVALID if reward is None else Outcome.FAILED
    return Group(members[0].task_id, made)


class _Faulty:
    """An environment that fails at its first step."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        raise EnvironmentFault("a planted fault")
