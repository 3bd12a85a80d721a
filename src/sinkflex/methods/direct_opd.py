"""Direct-OPD: what RL changed in a weak model, transferred to a strong one without a reward (arXiv 2607.05394).

T is a model after RL and R the same model before it; S samples. With C the K likeliest ids of S after a prefix:

    shift(v) = log T(v) - log R(v)                      whole distributions, at temperature 1
    A(v)     = w(v) shift(v),  w = softmax over C of log S(v)                     fixed; no baseline, no discount
    L        = 1/N sum_t sum_{v in C} -PPOclip(S(v) / S_old(v), A(v)) + b k3(S || S at the start of the stage)
    b       <- b (1 + kl_step) if the mean of A over tokens and ids is positive, b (1 - kl_step) if it is negative,
               held between kl_least and kl_most: it brakes where S agrees with the shift already

With K = V this is the gradient of E_S[shift]. `variant = "sampled"` takes A = shift of the drawn id alone. With
`outcome_weight` GRPO's advantages join in, on the drawn ids. Several pairs come one after the other (`stage_steps`
each): b and the start are set anew.

What we changed: setting anew is our choice, the paper is silent. `center` subtracts sum_v w(v) shift(v), without which
a constant in the shift leaks into the gradient under the cut to K ids; b still follows the A of the paper.
When it fails: on ids that T and R both hold for impossible the shift is noise (`shift_limit` bounds it). A pair that
differs by more than RL hands that on, too. `shuffle_shift` is the control: the shifts of a row at other places.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from sinkflex.learner.losses import LossInputs, aggregate, clipped_surrogate, kl_estimate
from sinkflex.learner.scorer import Scorer
from sinkflex.methods.hooks import Services
from sinkflex.methods.method import Method
from sinkflex.methods.policy_shift import DirectOPDOptions, next_weight, statistics, weighted
from sinkflex.seeds import generator
from sinkflex.trajectory import Group, Row

CANDIDATES, OLD, WEIGHTED, START = "candidates", "candidate_logprobs", "weighted_shift", "start_logprobs"
MAX_LOG_RATIO = 20.0
NOTHING = "without method.teachers nothing is learned. Type method.outcome_weight = 1, or the folders of a pair."


class DirectOPD(Method):
    """The shift of a pair of models as a reward for each token."""

    Options = DirectOPDOptions
    options: DirectOPDOptions

    def __init__(self, options: dict[str, Any], max_tokens: int) -> None:
        super().__init__(options, max_tokens)
        self.step, self.kl_weight, self.start = 0, self.options.kl_coefficient, "reference"
        self.seen: dict[str, float] = {}

    @property
    def needs_reference(self) -> bool:
        """False: the KL's is scored with the pair, since it changes with the stage."""
        return False

    @property
    def needs_candidates(self) -> str:
        """The ids whose log-probs the loss reads."""
        return CANDIDATES if self.options.teachers and self.options.variant == "top_k" else ""

    @property
    def stage(self) -> int:
        """Which pair is at work."""
        return min(self.step // max(self.options.stage_steps, 1), len(self.options.teachers) - 1)

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return GRPO's advantages times `outcome_weight`."""
        return [np.float32(self.options.outcome_weight) * a for a in super().advantages(group)]

    def score(self, groups: Sequence[Group], rows: Sequence[Row], scorer: Scorer) -> None:
        """Give each row its candidates and A, or put A on its advantages, and score the start of the stage."""
        options = self.options
        if self.kl_weight:
            for row, logprobs in zip(rows, scorer.logprobs(rows, self.start), strict=True):
                row.streams[START] = logprobs
        if not (options.teachers or options.outcome_weight):
            raise ValueError(NOTHING)
        if not options.teachers:
            return
        if self.needs_candidates:
            for row, (ids, logprobs) in zip(rows, scorer.top_k(rows, k=options.k), strict=True):
                row.streams[CANDIDATES], row.streams[OLD] = ids, logprobs
        pair = options.teachers[self.stage], options.teacher_references[self.stage]
        scored = [scorer.logprobs(rows, model, self.needs_candidates, temperature=1.0) for model in pair]
        shifts, rewards, mass = [], [], [np.zeros(0)]
        for number, (row, after, before) in enumerate(zip(rows, *scored, strict=True)):
            limit = options.shift_limit or np.inf
            shift = (after - before).clip(-limit, limit)
            if options.shuffle_shift:
                draws = generator(0, "shift", self.step, number)
                shift[row.loss_mask] = draws.permutation(shift[row.loss_mask])
            a = shift
            if self.needs_candidates:
                old = row.streams[OLD]
                row.streams[WEIGHTED] = np.where(row.loss_mask[:, None], weighted(shift, old, options.center), 0)
                a = weighted(shift, old, False)
                mass.append(np.exp(old[row.loss_mask]).sum(1))
            else:
                row.advantages += shift
            shifts.append(shift[row.loss_mask])
            rewards.append(a[row.loss_mask])
        self.seen = statistics(shifts, rewards, np.concatenate(mass))

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return GRPO's loss on the drawn ids, plus that of the candidates, plus the KL to the start of the stage."""
        options = self.options
        loss, sums = super().loss(inputs)
        if inputs.candidate_logprobs is not None:
            old = inputs.streams[OLD]
            near = old + (inputs.candidate_logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            of_ids = replace(
                inputs,
                policy_logprobs=near,
                behavior_logprobs=old,
                proximal_logprobs=None,
                advantages=inputs.streams[WEIGHTED],
            )
            values, _ = clipped_surrogate(of_ids, options.clip_low, options.clip_high, options.dual_clip)
            loss = loss + aggregate(values.sum(1), inputs, options.aggregation, self.max_tokens)
        if START in inputs.streams:
            kl = kl_estimate(replace(inputs, reference_logprobs=inputs.streams[START]), options.kl_estimator)
            loss = loss + self.kl_weight * aggregate(kl, inputs, options.aggregation, self.max_tokens, True)
            sums["kl"] = kl.detach().sum()
        return loss, sums

    def after_step(self, groups: Sequence[Group], metrics: dict[str, float], services: Services) -> None:
        """Move b, and begin the next stage when it is due: its start is a copy of the policy as it is now."""
        options, stage = self.options, self.stage
        metrics |= {**self.seen, "direct_opd/kl_coefficient": self.kl_weight}
        if self.kl_weight and self.seen:
            limits = options.kl_step, options.kl_least, options.kl_most
            self.kl_weight = next_weight(self.kl_weight, self.seen["direct_opd/reward"], *limits)
        self.step += 1
        if self.stage != stage:
            folder = services.directory / f"stage_{self.stage}"
            shutil.copytree(services.directory / "warm_start", folder, dirs_exist_ok=True)
            services.scorer.save("policy", folder)
            self.start, self.kl_weight = str(folder), options.kl_coefficient

    def state_dict(self) -> dict[str, Any]:
        """Return the steps done, b, and where the start of the stage is."""
        return {"step": self.step, "kl_weight": self.kl_weight, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.step, self.kl_weight, self.start = state["step"], state["kl_weight"], state["start"]
