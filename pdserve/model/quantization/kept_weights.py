"""The quantized weights that V2 keeps in their format in memory. V1 dequantizes all weights when it loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.checkpoint import quantized_weights
from pdserve.checkpoint.quantized_weights import PLAIN
from pdserve.model.quantization.weight_formats import FP8_AT_LOAD, UNQUANTIZED, WeightFormat, storage_rules

#: Names of linear layers and experts in native families; Mixtral's experts have the last three.
_PROJECTIONS = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
_GATED_DELTA = tuple(f".{name}.weight" for name in ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"))
_LATENT = ".q_a_proj.weight", ".q_b_proj.weight", ".kv_a_proj_with_mqa.weight"
_LINEARS = *_PROJECTIONS, *_GATED_DELTA, *_LATENT, ".w1.weight", ".w2.weight", ".w3.weight"
_SCALES = 1e-3  # bytes per weight: a float32 for each output, or fewer

#: E2M1, and a byte for 32 of them; gpt-oss's experts have it, its other layers are unquantized.
MXFP4 = WeightFormat(bytes_per_expert_weight=lambda dtype: 0.5 + 1 / MXFP4_BLOCK)
MXFP4_BLOCK = 32  # inputs that share a scale
FP8 = WeightFormat("fp8.Fp8LinearMethod", lambda dtype: 1 + _SCALES, experts_method="fp8_experts.Fp8Experts")


def is_linear(name: str) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear layer, or of one expert's."""
    return name.endswith(_LINEARS)


def fp8_blocks(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return outputs and inputs that share a scale; (1, 0): one output, all inputs. Scales per tensor count as such.

    ``options`` is the quantization_config of a checkpoint that ``kept_format`` accepts.
    """
    rules = storage_rules(str(options.get("quant_method")), options)
    if not rules:  # FP8_AT_LOAD
        return 1, 0
    rows, columns = rules[0].block
    return (rows, columns) if columns else (1, 0)


def kept_format(weight_format: str, options: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format in memory of a checkpoint's weights on V2; None if they are dequantized."""
    if weight_format == UNQUANTIZED:
        return None
    if weight_format == FP8_AT_LOAD:
        return FP8
    rules = storage_rules(weight_format, options) or ()
    if any(rule.packing == quantized_weights.MXFP4 for rule in rules):
        return MXFP4
    kept = all(rule.packing == PLAIN and rule.dtype == "F8_E4M3" and not rule.has_zero_points for rule in rules)
    return FP8 if rules and kept and len({rule.block[1] for rule in rules}) == 1 else None
