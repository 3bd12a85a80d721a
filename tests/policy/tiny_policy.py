"""A very small policy of the real shape, for tests that need a model."""

from __future__ import annotations

from functools import cache

import torch

from sinkflex.config import Config, ModelConfig, TinyConfig
from sinkflex.policy.model import Policy, new_policy

SHAPE = TinyConfig(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=32, window=8, vocabulary=512, max_tokens=2048
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_line",
            "description": "Look a line up.",
            "parameters": {
                "type": "object",
                "properties": {"line_id": {"type": "string"}, "deep": {"type": "boolean"}},
            },
        },
    }
]


@cache
def tiny_policy(seed: int = 0) -> Policy:
    """Return a random policy whose sinks and biases are far from zero, so that each of them matters."""
    config = Config(model=ModelConfig(tiny=SHAPE))
    policy = new_policy(config, lambda: ["Please check the line. ", '{"line_id": "L1001", "deep": true}'] * 5)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return policy
