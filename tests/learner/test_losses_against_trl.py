"""Losses and advantages equal those of TRL 1.16 on ragged batches, where both define the same quantity.

TRL's `_compute_loss` runs as it is, given our log-probs in place of a model's. Where the two differ by a constant or by
definition, the test says so.

    pip install --no-deps trl==1.16.0 accelerate datasets   (beside this package's own dependencies)
    pytest -m peers
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sinkflex.envs.env import Action, StopReason
from sinkflex.learner.losses import LossInputs, mismatch_weight
from sinkflex.methods.grpo import GRPO
from sinkflex.methods.gspo import GSPO
from sinkflex.methods.method import Method
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn

pytestmark = pytest.mark.peers

LONGEST = 9


@pytest.fixture(scope="module")
def trainer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl==1.16.0")
        assert trl.__version__.startswith("1.16"), trl.__version__
        return trl.GRPOTrainer


class Batch:
    """Log-probs of ragged episodes, right-padded as TRL wants them."""

    def __init__(self, seed: int, episodes: int = 6) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = [1, LONGEST, *torch.randint(1, LONGEST, (episodes - 2,), generator=rng).tolist()]
        self.mask = (torch.arange(LONGEST) < torch.tensor(lengths)[:, None]).double()

        def noise(scale: float) -> torch.Tensor:
            return scale * torch.randn(episodes, LONGEST, generator=rng, dtype=torch.float64)

        self.behavior = noise(0.7) - 2
        self.proximal = self.behavior + noise(0.2)
        self.policy = (self.proximal + noise(0.3)).requires_grad_()
        self.reference = self.behavior + noise(0.3)
        self.advantages = noise(1.0)[:, 0]

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.mask.bool()]

    def ours(self, options: dict[str, Any], method: type[Method] = GRPO) -> torch.Tensor:
        lengths = self.mask.sum(1, keepdim=True).expand_as(self.mask)
        tokens, trajectories = int(self.mask.sum()), len(self.mask)
        inputs = LossInputs(
            policy_logprobs=self.flat(self.policy),
            behavior_logprobs=self.flat(self.behavior),
            advantages=self.flat(self.advantages[:, None].expand_as(self.mask)),
            trajectory=self.flat(torch.arange(trajectories)[:, None].expand_as(self.mask)),
            trajectory_tokens=self.flat(lengths),
            tokens=tokens,
            trajectories=trajectories,
            reference_logprobs=self.flat(self.reference) if "kl_coefficient" in options else None,
            proximal_logprobs=self.flat(self.proximal) if "correction" in options else None,
        )
        return method(options, LONGEST).loss(inputs)[0]

    def theirs(self, trainer: Any, options: dict[str, Any], corrected: torch.Tensor | None = None) -> torch.Tensor:
        config = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **options}
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        this = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.policy, torch.zeros_like(self.mask), None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=config.get("level", "token"),
            beta=config.get("beta", 0.0),
            loss_type=config["loss_type"],
            epsilon_low=config.get("epsilon_low", 0.2),
            epsilon_high=config.get("epsilon_high", 0.2),
            args=SimpleNamespace(**config),
            use_vllm=corrected is not None,
            vllm_importance_sampling_correction=True,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=LONGEST,
            accelerator=accelerator,
            _entropy_bonus_enabled=False,
            _metrics={"train": {name: [] for name in METRICS}},
        )
        ids = torch.zeros(self.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.behavior if corrected is None else self.proximal,
            "ref_per_token_logps": self.reference,
            "importance_sampling_ratio": corrected,
            "num_items_in_batch": self.mask.sum(),
        }
        return trainer._compute_loss(this, None, inputs)


CLIPS = ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
METRICS = ("kl", "entropy", "cispo_clip_ratio", *(f"clip_ratio/{name}" for name in CLIPS))
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token_mean", "clip_high": 0.28}),
    ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    ({"loss_type": "luspo"}, {"aggregation": "trajectory_sum"}),
    ({"loss_type": "dapo", "delta": 1.3}, {"dual_clip": 1.3}),
    # TRL bounds CISPO's weight above alone, and counts from 0.
    ({"loss_type": "cispo", "epsilon_high": 1.1}, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.1}),
    ({"loss_type": "grpo", "beta": 0.3}, {"aggregation": "sequence_mean", "kl_coefficient": 0.3}),
    (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
        {"kl_coefficient": 0.3, "kl_estimator": "k3_ratio"},
    ),
]


def assert_same(batch: Batch, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=0)
    gradients = [batch.flat(torch.autograd.grad(x, batch.policy)[0]) for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_and_its_gradient_equal_trls(trainer: Any, seed: int) -> None:
    batch = Batch(seed)
    theirs = batch.theirs(trainer, {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15})
    assert_same(batch, batch.ours({"clip_low": 0.1, "clip_high": 0.15}, GSPO), theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("theirs", "ours"), SAME, ids=lambda x: "-".join(map(str, x.values())))
def test_a_loss_and_its_gradient_equal_trls(trainer: Any, theirs: dict, ours: dict, seed: int) -> None:
    batch = Batch(seed)
    assert_same(batch, batch.ours(ours), batch.theirs(trainer, theirs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("correction", ["token_truncate", "token_mask"])
def test_a_corrected_loss_equals_trls(trainer: Any, correction: str, seed: int) -> None:
    """TRL computes this weight while it generates, out of reach of a test: its formula is written out here."""
    batch, low, high = Batch(seed), 0.8, 1.2
    weight = (batch.proximal - batch.behavior).exp()
    inside = (weight >= low) & (weight <= high)
    weight = weight.clamp(low, high) if correction == "token_truncate" else weight.masked_fill(~inside, 0.0)
    options = {"correction": correction, "correction_low": low, "correction_high": high}
    assert_same(batch, batch.ours(options), batch.theirs(trainer, {"loss_type": "dapo"}, weight))


@pytest.mark.parametrize(("tokens", "kept"), [(8_000, 0.39), (20_000, 0.15)])
def test_trls_default_weight_of_a_long_episode_vanishes_and_ours_does_not(tokens: int, kept: float) -> None:
    """TRL's default multiplies ratios over the episode and drops products above 3. The noise is 0.02 a token."""
    rng = torch.Generator().manual_seed(0)
    gaps = 0.02 * torch.randn(400, tokens, generator=rng, dtype=torch.float64) - 0.02**2 / 2  # the mean ratio is 1
    product = gaps.sum(1).exp()
    assert float(product.where(product <= 3, 0).mean()) == pytest.approx(kept, abs=0.08)
    zeros, owner = torch.zeros(gaps.numel(), dtype=torch.float64), torch.arange(400).repeat_interleave(tokens)
    inputs = LossInputs(zeros, -gaps.flatten(), zeros, owner, torch.full_like(owner, tokens), 1, 1)
    inputs.proximal_logprobs = zeros
    for correction in ("token_truncate", "token_mask", "trajectory_mask"):
        weight, _ = mismatch_weight(inputs, correction, 0.5, 2.0)
        assert abs(float(weight.mean()) - 1) < 1e-3


@pytest.mark.parametrize("scale", ["std", "none"])
def test_advantages_equal_trls(trainer: Any, scale: str) -> None:
    """TRL adds 1e-4 to the deviation where we add 1e-6 (its GRPO trainer, group scale); the rest is equal."""
    from trl.trainer.utils import nanstd

    rng = np.random.default_rng(0)
    for size in (2, 4, 8):
        rewards = rng.random(size)
        members = [
            Trajectory("t", i, [Turn([1], [2], [0.0], 0, Action())], Outcome.FAILED, StopReason.USER_STOP, r)
            for i, r in enumerate(rewards.tolist())
        ]
        ours = [float(a[0]) for a in GRPO({"advantage_scale": scale}, 1).advantages(Group("t", members))]
        values = torch.tensor(rewards)
        theirs = values - values.nanmean()
        if scale == "std":
            theirs = theirs / (nanstd(values) + 1e-4) * (nanstd(values) + 1e-4) / (nanstd(values) + 1e-6)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
