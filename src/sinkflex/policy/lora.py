"""LoRA through peft (arXiv 2106.09685): y = W x + (alpha / rank) B A x, where A and B are trained and W never is.

Adapters are put into the model in place, so that sampler, learner and attention see the model they always see. Folders
are in peft's own format and name their base, a Hugging Face folder that stays as it is. A model has one adapter at
a time, which is all that differs between a policy and its reference.
"""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from sinkflex.config import LoraConfig
from sinkflex.recipe import did_you_mean

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names of files
PREFIX = "base_model.model."  # of the tensors in them
ADAPTER = "default"


def adapt(model: PreTrainedModel, options: LoraConfig, base: Path, seed: int) -> None:
    """Freeze a model and put new adapters into it. As B is 0, the model says what it said before.

    Args:
        model: a causal LM, changed in place.
        options: rank, alpha and targets.
        base: the folder the model is from.
        seed: seed of A; the global torch generator is left as it was.

    Raises:
        ValueError: peft is not installed, or a target is no layer that can have an adapter.
    """
    head = model.get_output_embeddings()
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head)
    linear = sorted({name.rpartition(".")[2] for name, _ in layers})
    targets = list(options.targets)
    unknown = [name for name in targets if name.rpartition(".")[2] not in linear and name != "all-linear"]
    if unknown:
        hint = did_you_mean(unknown[0], linear)
        raise ValueError(
            f"model.lora.targets: {unknown[0]!r} is no inner linear layer.{hint} This model has {', '.join(linear)}."
        )
    config = _peft().LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        # By name: peft's own "all-linear" counts the fused experts of some families among them.
        target_modules=linear if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config, base)


def base_of(folder: Path) -> Path | None:
    """Return the folder of the weights that the adapter in a folder belongs to; None if there is no adapter.

    Raises:
        ValueError: the adapter does not say, or its base is gone.
    """
    if not (folder / CONFIG).is_file():
        return None
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model.path: {folder / CONFIG} names no base_model_name_or_path ({error!r})") from error
    if not (Path(str(base)) / "config.json").is_file():
        raise ValueError(
            f"model.path: {folder} holds an adapter of {base}, which is no Hugging Face folder on this machine. Type "
            f"its place in base_model_name_or_path of {folder / CONFIG}."
        )
    if (Path(base) / CONFIG).is_file():
        raise ValueError(
            f"model.path: {folder} holds an adapter of an adapter, {base}. Merge that one: sinkflex export"
        )
    return Path(base)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Freeze a model and put the adapter of a folder into it.

    Raises:
        ValueError: peft is not installed, or the adapter is not one of this model.
    """
    peft = _peft()
    config = peft.PeftConfig.from_pretrained(str(folder))
    odd = [name for name in ("modules_to_save", "target_parameters") if getattr(config, name, None)]
    if not isinstance(config, peft.LoraConfig) or config.bias != "none" or odd:
        what = odd[0] if odd else "biases" if isinstance(config, peft.LoraConfig) else type(config).__name__
        raise ValueError(
            f"model.path: {folder} holds an adapter with {what}, expected matrices of LoRA alone. Merge it into its "
            "base with peft, and give that folder"
        )
    config.inference_mode = False
    config.lora_dropout = 0.0  # the learner's log-probs would differ from the sampler's
    _inject(model, config, Path(config.base_model_name_or_path))
    _fill(model, folder)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights and config of a model; of one with adapters these alone, as `peft.PeftModel` reads them."""
    if not _adapted(model):
        model.save_pretrained(folder)
        return
    model.peft_config[ADAPTER].save_pretrained(str(folder))  # type: ignore[index]
    tensors = _peft().get_peft_model_state_dict(model, adapter_name=ADAPTER)
    save_file({PREFIX + name: x.contiguous() for name, x in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def rank_of(model: PreTrainedModel) -> int:
    """Return the rank of a model's adapters, 0 if it has none."""
    return model.peft_config[ADAPTER].r if _adapted(model) else 0  # type: ignore[union-attr]


def require_rank(model: PreTrainedModel, options: LoraConfig, folder: Path) -> None:
    """Require what was loaded from a folder to be trained as the options say.

    Raises:
        ValueError: adapters of another rank, adapters that were not asked for, or none.
    """
    rank = rank_of(model)
    if rank != options.rank:
        held = f"an adapter of rank {rank}" if rank else "whole weights"
        raise ValueError(
            f"model.lora.rank is {options.rank}, but {folder} holds {held}. Type model.lora.rank = {rank}, or start "
            "anew in another run.directory."
        )


def twin(model: PreTrainedModel, folder: Path) -> PreTrainedModel | None:
    """Return a frozen model with the adapter of a folder, on the very weights of `model`: nothing large is copied.

    None if the folder holds no adapter of the same shape and base.
    """
    if not (_adapted(model) and (folder / CONFIG).is_file()):
        return None
    config = _peft().PeftConfig.from_pretrained(str(folder))
    mine, other = (_shape(c) for c in (model.peft_config[ADAPTER], config))  # type: ignore[index]
    if mine != other:
        return None
    made = copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
    _fill(made, folder)
    return made.requires_grad_(False)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the adapters to the weights of a model, and return it without them, an ordinary model; in place."""
    if not _adapted(model):
        return model
    layers: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if hasattr(m, "base_layer")]
    for name, layer in layers:
        layer.merge(safe_merge=True)  # which refuses what is not finite
        model.set_submodule(name, layer.base_layer)
    del model.peft_config
    return model.requires_grad_(True)


def _inject(model: PreTrainedModel, config: Any, base: Path) -> None:
    config.base_model_name_or_path = str(base.resolve())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights, which are refused below
            _peft().inject_adapter_in_model(config, model, ADAPTER)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"model.lora: {str(error).strip().splitlines()[0]}") from error
    if config.target_parameters:
        found = ", ".join(sorted(config.target_parameters))
        raise ValueError(
            f"model.lora.targets: peft takes some of these names for fused experts ({found}), which have no adapters "
            'here. Type model.lora.targets = ["q_proj", "k_proj", "v_proj", "o_proj"], or the names of this model.'
        )
    if hasattr(model.get_output_embeddings(), "base_layer"):
        raise ValueError(f"model.path: the adapter of {base} changes the output layer too, which is not supported")
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # sets are saved in any order


def _fill(model: PreTrainedModel, folder: Path) -> None:
    """Give the adapters the weights of a folder."""
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"model.path: {folder} has no {WEIGHTS} beside its {CONFIG}")
    saved = {name.removeprefix(PREFIX): x for name, x in load_file(folder / WEIGHTS).items()}
    places = _peft().get_peft_model_state_dict(model, adapter_name=ADAPTER)
    if saved.keys() != places.keys() or any(saved[name].shape != x.shape for name, x in places.items()):
        odd = sorted(saved.keys() ^ places.keys()) or ["shapes"]
        raise ValueError(f"model.path: the adapter in {folder} is not one of this model: {odd[0]} differs")
    with torch.no_grad():
        for name, x in places.items():
            x.copy_(saved[name])


def _shape(config: Any) -> dict[str, Any]:
    said = config.to_dict()
    left_out = ("inference_mode", "peft_version", "lora_dropout", "revision")
    return {k: sorted(v) if isinstance(v, set | list) else v for k, v in said.items() if k not in left_out}


def _adapted(model: PreTrainedModel) -> bool:
    return hasattr(model, "peft_config")


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            'model.lora needs peft, which is not installed. Type: pip install "sinkflex[lora]", or leave model.lora out'
        ) from error
