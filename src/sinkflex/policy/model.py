"""The policy: a Hugging Face causal LM with its tokenizer, on a device, with its attention path checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from sinkflex.attention.huggingface import NAME, require_isolation, require_live_sinks
from sinkflex.config import Config, RunConfig
from sinkflex.policy import experts, lora
from sinkflex.policy.tiny import build_model, build_tokenizer

transformers_logging.disable_progress_bar()


@dataclass(slots=True)
class Policy:
    """Model and tokenizer, saved and loaded as one ordinary Hugging Face folder."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def save(self, folder: Path) -> None:
        """Write config, weights (safetensors; of adapters alone, if there are any), tokenizer and chat template."""
        lora.save_model(self.model, folder)
        self.tokenizer.save_pretrained(folder)


def device_of(run: RunConfig) -> torch.device:
    """Return the device a run asks for; "auto" prefers CUDA. There are no kernels with sinks for other GPUs.

    Raises:
        ValueError: the device is not there.
    """
    cuda = torch.cuda.is_available()
    if run.device == "cuda" and not cuda:
        raise ValueError("run.device is cuda, but torch sees none: use --set run.device=auto")
    return torch.device("cuda" if cuda and run.device != "cpu" else "cpu")


def new_policy(config: Config, texts: Callable[[], Iterable[str]]) -> Policy:
    """Build the policy a recipe starts from.

    Args:
        config: `model.path` is "tiny" or a local Hugging Face folder.
        texts: what a new tokenizer is trained on (called for the tiny policy only).
    """
    options, folder = config.model.lora, Path(config.model.path)
    if config.model.path != "tiny":
        policy = load_policy(config, folder)
        if options.rank and not lora.rank_of(policy.model):
            lora.adapt(policy.model, options, folder, config.run.seed)
        lora.require_rank(policy.model, options, folder)
        return policy
    tokenizer = build_tokenizer(texts(), config.model.tiny.vocabulary)
    return _prepare(config, build_model(config.model.tiny, len(tokenizer), config.run.seed), tokenizer)


def continued_policy(config: Config, folder: Path) -> Policy:
    """Load the policy of a checkpoint, which must be trained as the recipe says."""
    policy = load_policy(config, folder)
    lora.require_rank(policy.model, config.model.lora, folder)
    return policy


def load_policy(config: Config, folder: Path) -> Policy:
    """Load a policy from a Hugging Face folder on this machine, or an adapter and its base; nothing is downloaded.

    Raises:
        ValueError: the folder is missing, is no model, or lacks some of its weights.
    """
    base = lora.base_of(folder)
    if base is None:
        return _load_whole(config, folder, folder)
    policy = _load_whole(config, base, folder if (folder / "tokenizer_config.json").is_file() else base)
    lora.load_adapter(policy.model, folder)
    return policy


def _load_whole(config: Config, folder: Path, words: Path) -> Policy:
    """Load the weights of one folder with the tokenizer of another."""
    if not (folder / "config.json").is_file():
        found = f"{folder} has no config.json" if folder.is_dir() else f"{folder} is no folder"
        raise ValueError(f"model.path: {found}: give a local Hugging Face folder, or tiny")
    trust = config.model.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(words, local_files_only=True, trust_remote_code=trust)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=trust,
            use_safetensors=True,  # the other format is a pickle, which can run code
            dtype=torch.float32,
            output_loading_info=True,
        )
        model, report = loaded
        for how in ("is_local", "local_files_only"):  # how it was loaded, not what it is
            tokenizer.init_kwargs.pop(how, None)
    except Exception as error:  # a broken folder fails in any of a dozen ways
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "custom code" in reason and not trust:
            reason = "it has code of its own. Read that; if you trust it, type --set model.trust_remote_code=true"
        raise ValueError(f"model.path: {folder} cannot be loaded as a causal language model: {reason}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"model.path: {folder} lacks weights, which would be random: {', '.join(missing[:3])} ...")
    return _prepare(config, model, tokenizer)


def _prepare(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Policy:
    cast(torch.nn.Module, model).to(device_of(config.run)).eval()
    modules: list[Any] = list(model.modules())
    # Dropout would make the learner's log-probs differ from the sampler's. Models also keep it as plain numbers.
    for holder in (model.config, *modules):
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
    for module in modules:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # no padding is ever fed, but eos may have its id and must be learned
    model.set_attn_implementation(NAME)
    if any(hasattr(module, "gate_up_proj") and hasattr(module, "has_gate") for module in modules):
        model.set_experts_implementation(experts.NAME)
    require_live_sinks(model)
    require_isolation(model)
    return Policy(model, tokenizer)
