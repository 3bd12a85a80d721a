"""Layer checkpointing that keeps the attention output: the backward recomputes a layer, but not its attention.

A checkpointed layer keeps its input only, and is run again in the backward. Attention is the part of that second run
that grows with the square of the length, while its output and log-sum-exp are as small as the layer's input; so they
are kept, and the second run finds them. Projections, norms and experts are recomputed.

Dropout must be 0 (it is everywhere in this package), since the random state is not restored.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from sinkflex.attention.sink import kept_attention


def checkpoint_layers(model: PreTrainedModel) -> int:
    """Checkpoint every layer of a model on `sink_plan`; active while `model.training` (transformers asks for it).

    Returns:
        The number of layers.

    Raises:
        ValueError: if the model has no layers that can be checkpointed.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that transformers can checkpoint; leave them as they are"
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(
            checkpoint,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
            context_fn=kept_attention,
        )
    return len(layers)
