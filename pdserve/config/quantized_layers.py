"""Decide whether a node keeps quantized weights in their format in memory."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pdserve.config.kept_weights import fp8_blocks, is_linear, kept_format
from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.config.runner_oracle import Decision
from pdserve.config.weight_formats import UNQUANTIZED


def kept_problem(model: ModelConfig, parallel: ParallelConfig, unquantized: Collection[str] = ()) -> str:
    """Say why V2 cannot keep the quantized weights of a model; empty if it can, or if none are quantized.

    ``unquantized`` names the tensors that are stored unquantized.
    """
    if model.weight_format == UNQUANTIZED:
        return ""
    if kept_format(model.weight_format, model.quantization) is None:
        return f"V2 runs unquantized and FP8 weights; these are {model.weight_format}"
    if model.moe is not None:
        return f"V2 keeps {model.weight_format} weights of dense models only; {model.architecture} has experts"
    left_out = next((name for name in sorted(unquantized) if is_linear(name)), None)
    if left_out is not None:
        return f"V2 needs all linear layers in {model.weight_format}, but {left_out} is stored unquantized"
    group = fp8_blocks(model.quantization)[1]
    for name, size in (("o_proj", model.num_heads * model.head_dim), ("down_proj", model.intermediate_size)):
        share = size // parallel.tp
        if parallel.tp > 1 and group and share % group:
            return f"tp {parallel.tp} gives {name} {share} inputs per shard, which cuts its scale blocks of {group}"
    return ""


def keep_quantized(model: ModelConfig, decision: Decision) -> ModelConfig:
    """Return the model as the chosen runner holds it in memory."""
    keeps = decision.runner == "V2" and kept_format(model.weight_format, model.quantization) is not None
    return msgspec.structs.replace(model, keeps_quantized=keeps)
