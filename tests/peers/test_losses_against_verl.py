"""Losses, gradients, weights and advantages equal verl 0.9.1's on ragged batches, where both define the same quantity.

verl lives in an environment of its own, and the two sides talk through files (`verl_side.py`). Where they differ by a
constant or by definition, the test says so.

    python -m venv FOLDER
    FOLDER/bin/pip install torch numpy transformers
    FOLDER/bin/pip install --no-deps verl==0.9.1
    SINKFLEX_VERL=FOLDER/bin/python pytest -m peers tests/peers
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkflex.envs.env import Action, StopReason
from sinkflex.learner.losses import LossInputs, kl_estimate, mismatch_weight
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.gspo import GSPO
from sinkflex.methods.method import Method
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn
from tests.learner.test_losses_against_trl import LONGEST, Batch

pytestmark = pytest.mark.peers

SEEDS = range(3)
OFF = 1e9  # verl's dual clip cannot be switched off
# (name, options) of verl, our options, and our method.
SAME: list[tuple[str, dict[str, Any], dict[str, Any], type[Method]]] = [
    ("vanilla", {"mode": "token-mean"}, {}, GRPO),
    ("vanilla", {"mode": "token-mean", "clip_ratio_high": 0.28}, {"clip_high": 0.28}, GRPO),
    ("vanilla", {"mode": "token-mean", "clip_ratio_c": 1.3}, {"dual_clip": 1.3}, GRPO),
    ("vanilla", {"mode": "seq-mean-token-mean"}, {"aggregation": "sequence_mean"}, GRPO),
    ("vanilla", {"mode": "seq-mean-token-sum"}, {"aggregation": "trajectory_sum"}, GRPO),
    ("vanilla", {"mode": "seq-mean-token-sum-norm"}, {"aggregation": "constant"}, GRPO),
    (
        "cispo",
        {"mode": "token-mean", "clip_ratio_low": 0.3, "clip_ratio_high": 0.1},
        {"surrogate": "cispo", "clip_low": 0.3, "clip_high": 0.1},
        GRPO,
    ),
    (
        "gspo",
        {"mode": "seq-mean-token-mean", "clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
        {"clip_low": 0.1, "clip_high": 0.15},
        GSPO,
    ),
]


@pytest.fixture(scope="module")
def python() -> str:
    named = os.environ.get("SINKFLEX_VERL", "")
    if not named:
        pytest.skip("SINKFLEX_VERL does not name the Python of an environment with verl 0.9.1")
    return named


def ask(python: str, folder: Path, questions: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Let verl answer questions, each a kind, a name, options, and numbers."""
    (folder / "questions.json").write_text(json.dumps(questions))
    command = [python, str(Path(__file__).with_name("verl_side.py")), "questions.json", "answers.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    answers = json.loads((folder / "answers.json").read_text())
    return [{name: torch.tensor(x, dtype=torch.float64) for name, x in answer.items()} for answer in answers]


def numbers(batch: Batch) -> dict[str, Any]:
    names = ("mask", "behavior", "proximal", "policy", "reference", "advantages")
    return {name: getattr(batch, name).tolist() for name in names}


def question(batch: Batch, kind: str, name: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "options": options, "numbers": numbers(batch)}


def inputs_of(batch: Batch) -> LossInputs:
    lengths = batch.mask.sum(1, keepdim=True).expand_as(batch.mask)
    return LossInputs(
        policy_logprobs=batch.flat(batch.policy),
        behavior_logprobs=batch.flat(batch.behavior),
        advantages=batch.flat(batch.advantages[:, None].expand_as(batch.mask)),
        trajectory=batch.flat(torch.arange(len(batch.mask))[:, None].expand_as(batch.mask)),
        trajectory_tokens=batch.flat(lengths),
        tokens=int(batch.mask.sum()),
        trajectories=len(batch.mask),
        reference_logprobs=batch.flat(batch.reference),
        proximal_logprobs=batch.flat(batch.proximal),
    )


def test_losses_and_gradients_equal_verls(python: str, tmp_path: Path) -> None:
    """verl adds 1e-8 to the length of a sequence in its mean of means; the rest is equal to rounding."""
    cases = [(Batch(seed), case) for seed in SEEDS for case in SAME]
    asked = [question(b, "loss", name, **{"clip_ratio_c": OFF, **theirs}) for b, (name, theirs, _, _) in cases]
    for (batch, (name, theirs, ours, method)), found in zip(cases, ask(python, tmp_path, asked), strict=True):
        loss = batch.ours(ours, method)
        (gradient,) = torch.autograd.grad(loss, batch.policy)
        slack = 2e-8 if theirs["mode"] == "seq-mean-token-mean" else 0
        torch.testing.assert_close(loss.detach(), found["value"], rtol=1e-12 + slack, atol=0, msg=f"{name} {theirs}")
        torch.testing.assert_close(gradient, found["gradient"], rtol=1e-10 + slack, atol=1e-14)


def test_kl_estimates_equal_verls(python: str, tmp_path: Path) -> None:
    """k2 and k3 are equal with their gradients; of k1 the value, since its gradient there does not know the reference.

    The gradient of our k1 is that of verl's `k1+`, where the ratio is 1.
    """
    batches = [Batch(seed) for seed in SEEDS]
    names = ("k1", "k2", "k3", "k1+")
    answers = iter(ask(python, tmp_path, [question(b, "kl", name) for b in batches for name in names]))
    for batch in batches:
        inputs = replace(inputs_of(batch), behavior_logprobs=batch.flat(batch.policy).detach())
        for name, found in zip(names, answers, strict=False):
            ours = kl_estimate(inputs, name.removesuffix("+")).sum()
            (gradient,) = torch.autograd.grad(ours, batch.policy, retain_graph=True)
            torch.testing.assert_close(ours.detach(), found["value"], rtol=1e-12, atol=1e-14)
            if name != "k1":
                torch.testing.assert_close(gradient, found["gradient"], rtol=1e-10, atol=1e-14)
            else:
                torch.testing.assert_close(found["gradient"], batch.mask, rtol=0, atol=0)


def test_weights_for_sampler_mismatch_equal_verls(python: str, tmp_path: Path) -> None:
    """Truncated ones have no lower bound in verl. A geometric mean over the sequence exists there as a filter alone."""
    batches = [Batch(seed) for seed in SEEDS]
    thresholds = (("token_truncate", 1e-9, 1.1, 1.1), ("token_mask", 0.9, 1.1, "0.9_1.1"))
    asked = [
        question(batch, "weights", "", rollout_is="token", rollout_is_threshold=theirs)
        for batch in batches
        for *_, theirs in thresholds
    ]
    answers = iter(ask(python, tmp_path, asked))
    for batch in batches:
        for correction, low, high, _ in thresholds:
            ours, sums = mismatch_weight(inputs_of(batch), correction, low, high)
            torch.testing.assert_close(ours, batch.flat(next(answers)["value"]), rtol=1e-12, atol=0)
            assert 0 < sums["corrected"] < len(ours)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("grpo", {}, {"advantage_scale": "std"}),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, {"advantage_scale": "none"}),
        ("grpo_vectorized", {}, {"advantage_scale": "std"}),
        ("rloo", {}, {"advantage_scale": "none", "baseline": "leave_one_out"}),
    ],
)
def test_advantages_equal_verls(name: str, theirs: dict, ours: dict, python: str, tmp_path: Path) -> None:
    """Both add 1e-6 to a deviation with ddof 1. verl pays a group of one its raw reward, or that over its deviation."""
    rng = np.random.default_rng(0)
    sizes = (2, 5, 8, 1)
    rewards, groups = rng.random(sum(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    given = {"mask": [[1.0]] * len(rewards), "rewards": rewards.tolist(), "groups": groups.tolist()}
    asked = [{"kind": "advantages", "name": name, "options": theirs, "numbers": given}]
    found = ask(python, tmp_path, asked)[0]["value"][:, 0].numpy()
    method, expected = GRPO(ours, LONGEST), []
    for g in range(len(sizes)):
        members = [
            Trajectory("t", i, [Turn([1], [2], [0.0], 0, Action())], Outcome.FAILED, StopReason.USER_STOP, float(r))
            for i, r in enumerate(rewards[groups == g])
        ]
        expected += [float(a[0]) for a in method.advantages(Group("t", members))]
    np.testing.assert_allclose(found[:-1], expected[:-1], rtol=1e-6)
    assert expected[-1] == 0.0 != found[-1]
