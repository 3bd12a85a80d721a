"""The policy of a run as one ordinary Hugging Face folder, for other programs: adapters are merged into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkflex.config import Config
from sinkflex.evaluate import open_policy
from sinkflex.policy.lora import merge, rank_of
from sinkflex.policy.model import Policy
from sinkflex.recipe import load_config


def export_model(source: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the policy of a run (best checkpoint, else newest) or of an adapter's folder as whole weights.

    Args:
        source: a run directory, or a folder that peft or transformers wrote.
        out: a new folder; `model` in the source if left out.

    Returns:
        Both folders, and the rank of the adapters that were merged.

    Raises:
        ValueError: there is no policy, or the folder holds something already.
    """
    out = out or source / "model"
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out {out} is there already: name a new folder")
    recipe = source / "config.toml"
    policy, where = open_policy(load_config(recipe, []) if recipe.is_file() else Config(), source)
    rank = rank_of(policy.model)
    draft = out.with_name(f".{out.name}")
    Policy(merge(policy.model), policy.tokenizer).save(draft)
    if out.is_dir():
        out.rmdir()
    draft.rename(out)
    return {"folder": str(out), "source": where, "merged_rank": rank}
