"""The paper's memory table on one CUDA card: peak memory of a gpt-oss-20b-shaped training step at 1k to 8k tokens.

    python benchmarks/paper_memory_gpu.py --layers 24 --json memory.json

Source: SinkFlex, arXiv 2608.10357: 28.06 GB with eager and 22.52 GB with FlexAttention at 4096 tokens, 25.53 GB and
out of memory at 8192. Its trainable weights, optimizer and precision are not given. Here the weights are random,
bfloat16 and frozen but for the attention projections and the sinks, gradients are there before, no optimizer runs,
layers are checkpointed in every row, and the peak is CUDA's high-water mark of allocated bytes, weights included. The
full model holds 42 GB of bfloat16 weights (the paper's figures are below that, so its weights were quantized); fewer
--layers keep the shape of the comparison, since the peak above the weights is one live layer, the logits, and a layer
input each.

    attention   eager | sink_flex | sink_plan
    loss        whole: float32 logits of all tokens | chunked
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# gpt-oss-20b, every number that shapes memory. 24 layers; even ones have the window.
CONFIGURATION: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
}
ROWS = (
    ("eager", "whole"),
    ("sink_flex", "whole"),
    ("sink_plan", "whole"),
    ("sink_flex", "chunked"),
    ("sink_plan", "chunked"),
)
TOKENS = (1024, 2048, 4096, 8192)


def measure(attention: str, loss: str, tokens: int, layers: int) -> dict[str, Any]:
    """Peak bytes and seconds of one step; run in a process of its own."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    import sinkflex.attention.huggingface
    import sinkflex.policy.experts  # noqa: F401
    from sinkflex.learner.checkpointing import checkpoint_layers
    from sinkflex.learner.vocabulary import weighted_logprob

    torch.manual_seed(0)
    config = GptOssConfig(**CONFIGURATION, num_hidden_layers=layers)
    with torch.device("cuda"):
        model = GptOssForCausalLM._from_config(
            config,
            attn_implementation=attention,
            experts_implementation="grouped_mm" if attention == "eager" else "sorted_mm",
            dtype=torch.bfloat16,
        ).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    model.enable_input_require_grads()
    if attention == "eager":
        model.activation_checkpointing_enable()
    else:
        checkpoint_layers(model)

    def step(length: int) -> None:
        ids = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        if loss == "whole":
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
            return
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        weights = torch.full((length - 1,), -1 / (length - 1), device="cuda")
        weighted_logprob(hidden, model.lm_head.weight, ids[0, 1:], weights).backward()

    step(256)  # kernels compile and libraries take their workspaces
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(tokens)
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "rise_bytes": peak - held, "seconds": begin.elapsed_time(end) / 1000}


def main() -> None:
    """Measure every row at every length and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        attention, loss, tokens = options.cell
        print(json.dumps(measure(attention, loss, int(tokens), options.layers)))
        return
    rows = []
    print("attention  loss      tokens   peak GB   rise GB   seconds")
    for tokens in options.tokens:
        for attention, loss in ROWS:
            command = [
                sys.executable,
                __file__,
                "--layers",
                str(options.layers),
                "--cell",
                attention,
                loss,
                str(tokens),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            row = {"attention": attention, "loss": loss, "tokens": tokens, "layers": options.layers}
            if done.returncode:
                row["refused"] = (done.stderr.strip().splitlines() or ["?"])[-1]
                print(f"{attention:10} {loss:8} {tokens:7}   {row['refused'][:80]}")
            else:
                row |= json.loads(done.stdout.strip().splitlines()[-1])
                sizes = f"{row['peak_bytes'] / 1e9:9.2f} {row['rise_bytes'] / 1e9:9.2f} {row['seconds']:9.2f}"
                print(f"{attention:10} {loss:8} {tokens:7} {sizes}")
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
