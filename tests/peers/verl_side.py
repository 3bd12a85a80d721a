"""Runs verl 0.9.1's own functions on numbers from a file: `python verl_side.py QUESTIONS ANSWERS`, both JSON.

It is run by the Python of verl's environment and imports nothing of this package. Of verl it runs the files with the
formulas alone. What these import beside formulas (Ray, configs) is left out, so that verl needs no more than torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

VERSION = "0.9.1"
Numbers = dict[str, Any]


class ActorConfig(types.SimpleNamespace):
    """What a loss reads of verl's config of the same name."""

    clip_ratio = 0.2
    clip_ratio_c = 3.0
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def leave_out(name: str, **names: Any) -> types.ModuleType:
    """Put an empty module in the place of one that is not needed."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(names)
    return module


def formulas() -> tuple[Any, Any]:
    """Return verl's core_algos and rollout_corr_helper."""
    found = importlib.metadata.version("verl")
    assert found == VERSION, f"verl {found} is installed, expected {VERSION}"
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    for package in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        leave_out(package).__path__ = [str(root.joinpath(*package.split(".")[1:]))]
    leave_out("tensordict", TensorDict=object)
    leave_out("omegaconf", DictConfig=dict)
    leave_out("verl.protocol", DataProto=object)
    leave_out("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    leave_out("verl.trainer.config.algorithm", RolloutCorrectionConfig=object)
    leave_out("verl.workers.config", ActorConfig=ActorConfig)
    leave_out("verl.workers.config.actor", PolicyLossConfig=object)
    leave_out("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    leave_out("verl.utils.import_utils", deprecated=lambda _: lambda function: function)
    groups = importlib.import_module("verl.utils.groupwise")
    sys.modules["verl.utils"].__dict__.update(
        as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std
    )
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    return core, importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


def answer(question: Numbers, core: Any, correction: Any) -> Numbers:
    """Return what verl makes of one question, with the gradient by the policy's log-probs where there is one."""
    given = {name: torch.tensor(x, dtype=torch.float64) for name, x in question["numbers"].items()}
    mask, kind, name = given["mask"], question["kind"], question["name"]
    if kind == "advantages":
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = given["rewards"]
        groups = given["groups"].long().numpy()
        values, _ = core.get_adv_estimator_fn(name)(rewards, mask, groups, **question["options"])
        return {"value": values.tolist()}
    if kind == "weights":
        gap = given["proximal"] - given["behavior"]
        values, _ = correction.compute_rollout_correction_weights(gap, mask, **question["options"])
        return {"value": values.tolist()}
    policy = given["policy"].requires_grad_()
    if kind == "kl":
        loss = (core.kl_penalty(policy, given["reference"], name) * mask).sum()
    else:
        options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **question["options"]}
        mode, config = options.pop("mode"), ActorConfig(**options)
        advantages = given["advantages"][:, None].expand_as(mask)
        loss, _ = core.get_policy_loss_fn(name)(given["behavior"], policy, advantages, mask, mode, config)
    (gradient,) = torch.autograd.grad(loss, policy)
    return {"value": float(loss), "gradient": gradient.tolist()}


def main(questions: Path, answers: Path) -> None:
    core, correction = formulas()
    found = [answer(question, core, correction) for question in json.loads(questions.read_text())]
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
