"""Decide whether a node keeps quantized weights in their format in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from pdserve.config.parallel import ParallelConfig
from pdserve.config.runner_oracle import Decision
from pdserve.errors import ConfigError
from pdserve.model.latent import LatentConfig
from pdserve.model.model_config import ModelConfig
from pdserve.model.moe import MoEConfig
from pdserve.model.quantization.kept_weights import FP8, MXFP4, MXFP4_BLOCK, fp8_blocks, is_linear, kept_format
from pdserve.model.quantization.weight_formats import FP8_AT_LOAD, UNQUANTIZED

_FUSED = (".experts.gate_up_proj", ".experts.down_proj")  # as transformers 5 saves experts
_MEASURED = (9, 0)  # compute capability for which docs/numbers.md has figures
_GROUPS = (32, 64, 128)  # inputs that share a scale in the grouped products of experts


def kept_problem(
    model: ModelConfig, parallel: ParallelConfig, unquantized: Collection[str] = (), quantized: Collection[str] = ()
) -> str:
    """Say why V2 cannot keep the quantized weights of a model; empty if it can, or if none are quantized.

    ``unquantized`` and ``quantized`` name the weights that are stored so.
    """
    if model.weight_format == UNQUANTIZED:
        return ""
    kept = kept_format(model.weight_format, model.quantization)
    if model.gemma4 is not None:
        return "V2's products of quantized weights apply SiLU to gates; Gemma 4 has GELU"
    if kept is None:
        return f"V2 runs unquantized, FP8 and MXFP4 weights; these are {model.weight_format}"
    if kept is MXFP4:
        return _mxfp4_problem(model, parallel, unquantized)
    if model.weight_format == FP8_AT_LOAD:
        quantized = unquantized
        unquantized = ()
    left_out = next((name for name in sorted(unquantized) if is_linear(name)), None)
    if left_out is not None:
        return f"V2 needs all linear layers in {model.weight_format}, but {left_out} is stored unquantized"
    rows, group = fp8_blocks(model.quantization)
    if model.latent is not None and (problem := _rotated_problem(model.latent, model.num_heads, rows)):
        return problem
    if model.moe is not None and (problem := _experts_problem(model, model.moe, group, quantized)):
        return problem
    for name, size in _sliced_inputs(model, parallel):
        share = size // parallel.tp
        if group and share % group:
            return _cut(parallel, name, share, group)
    return ""


def kept_doubt(model: ModelConfig, dtype: str, device: str, capability: tuple[int, int] | None) -> str:
    """Say why V2 may be slower than V1 with quantized weights; empty where docs/numbers.md shows that it is faster.

    Elsewhere V2 multiplies dequantized FP8 weights, or no figures exist. ``device`` is a name, ``capability`` the
    compute capability of a GPU, where known.
    """
    if model.weight_format in (UNQUANTIZED, FP8_AT_LOAD) or (dtype == "bfloat16" and capability == _MEASURED):
        return ""
    return (
        f"V2 is the default for {model.weight_format} weights in bfloat16 on GPUs of compute capability "
        f"{'.'.join(map(str, _MEASURED))} (Hopper) only; this is {dtype} on {device}"
    )


def _cut(parallel: ParallelConfig, name: str, share: int, block: int) -> str:
    return f"tp {parallel.tp} gives {name} {share} inputs per shard, which cuts its scale blocks of {block}"


def _mxfp4_problem(model: ModelConfig, parallel: ParallelConfig, unquantized: Collection[str]) -> str:
    moe = model.moe
    if moe is None or not moe.has_bias:
        return f"V2 keeps the MXFP4 experts of gpt-oss; this is {model.architecture}"
    plain = next((name for name in sorted(unquantized) if name.endswith(_FUSED)), None)
    if plain is not None:
        return f"V2 needs all experts in MXFP4, but {plain} is stored unquantized"
    inner = moe.intermediate_size * parallel.ep // parallel.tp
    for name, share in (("gate_up_proj", model.hidden_size), ("down_proj", inner)):
        if share % MXFP4_BLOCK:
            return _cut(parallel, f"the experts' {name}", share, MXFP4_BLOCK)
    return ""


def _rotated_problem(latent: LatentConfig, num_heads: int, block: int) -> str:
    """Outputs that change places keep their scale only within a block of ``block`` outputs."""
    size = latent.qk_rope_head_dim
    queries = "q_b_proj" if latent.q_lora_rank else "q_proj"
    firsts = [(queries, head * latent.qk_head_dim + latent.qk_nope_head_dim) for head in range(num_heads)]
    for name, first in [*firsts, ("kv_a_proj_with_mqa", latent.kv_lora_rank)]:
        if latent.rope_interleave and block > 1 and first % block + size > block:
            return (
                f"V2 reorders the {size} rotated outputs of {name} from {first} on, which lie in two scale blocks of "
                f"{block}"
            )
    return ""


def _experts_problem(model: ModelConfig, moe: MoEConfig, group: int, quantized: Collection[str]) -> str:
    if moe.has_bias:
        return f"V2 keeps {model.weight_format} experts without biases; {model.architecture} has some"
    if group and group not in _GROUPS:
        sizes = ", ".join(map(str, _GROUPS))
        return f"V2 keeps experts with a scale per {sizes} or all inputs; {model.weight_format} has {group}"
    fused = next((name for name in sorted(quantized) if name.endswith(_FUSED)), None)
    return "" if fused is None else f"V2 keeps experts that are stored one by one, but {fused} has all of a layer"


def _sliced_inputs(model: ModelConfig, parallel: ParallelConfig) -> Iterator[tuple[str, int]]:
    """Yield the layers whose inputs tensor shards divide, and their inputs."""
    if parallel.tp == 1:
        return
    yield "o_proj", model.value_size
    if model.state is not None:
        yield "out_proj", model.state.value_heads * model.state.value_dim
    moe = model.moe
    if moe is None or moe.dense_layers:
        yield "down_proj", model.intermediate_size
    if moe is not None and parallel.ep == 1:
        yield "the experts' down_proj", moe.intermediate_size
    if moe is not None and moe.shared_intermediate_size:
        yield "the shared experts' down_proj", moe.shared_intermediate_size


def quantized_at_load(model: ModelConfig, requested: str) -> ModelConfig:
    """Return the model with the weight format that ``--quantization`` requests; the checkpoint's changes nothing.

    Raises ConfigError for another format than the checkpoint's, except FP8 in place of unquantized weights.
    """
    if requested in ("auto", model.weight_format):
        return model
    if requested != "fp8":
        raise ConfigError(
            f"quantization {requested}: the checkpoint has {model.weight_format} weights; leave the option out. fp8 "
            "quantizes unquantized weights when they are loaded"
        )
    if model.weight_format != UNQUANTIZED:
        if kept_format(model.weight_format, model.quantization) is FP8:
            return model
        raise ConfigError(
            f"quantization fp8: the checkpoint has {model.weight_format} weights; choose an unquantized one"
        )
    options = {"quant_method": FP8_AT_LOAD}
    return msgspec.structs.replace(model, weight_format=FP8_AT_LOAD, quantization=options)


def check_quantized_at_load(model: ModelConfig, decision: Decision) -> None:
    """Raise ConfigError if a runner without FP8 weights is to quantize them."""
    if model.weight_format == FP8_AT_LOAD and decision.runner == "V1":
        reasons = "; ".join(decision.reasons)
        raise ConfigError(f"quantization fp8 needs runner V2, which keeps weights in FP8; V1 was chosen: {reasons}")


def keep_quantized(model: ModelConfig, decision: Decision) -> ModelConfig:
    """Return the model as the chosen runner holds it in memory."""
    keeps = decision.runner == "V2" and kept_format(model.weight_format, model.quantization) is not None
    return msgspec.structs.replace(model, keeps_quantized=keeps)
