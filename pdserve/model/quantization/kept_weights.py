"""Quantized weights in memory: the forms that V2 keeps. V1 dequantizes all weights when it loads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pdserve.checkpoint import quantized_weights
from pdserve.checkpoint.quantized_weights import AWQ, FP4, FP4_PACKED, GPTQ, PACKED, PLAIN, QuantizedWeight, StorageRule
from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.weight_formats import storage_rules

#: Names of linear layers and experts in native families; Mixtral's experts have the last three.
_PROJECTIONS = tuple(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
_GATED_DELTA = tuple(f".{name}.weight" for name in ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"))
_SHORT_CONV = (".in_proj.weight",)  # its output projection has the name of gated delta nets
_LATENT = ".q_a_proj.weight", ".q_b_proj.weight", ".kv_a_proj_with_mqa.weight"
_LINEARS = *_PROJECTIONS, *_GATED_DELTA, *_SHORT_CONV, *_LATENT, ".w1.weight", ".w2.weight", ".w3.weight"
FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # as transformers 5 saves experts

#: Projections that a layer may have, outside of its experts.
LINEAR_PARTS = tuple(
    name.removeprefix(".").removesuffix(".weight") for name in (*_PROJECTIONS, *_GATED_DELTA, *_SHORT_CONV, *_LATENT)
)
EXPERTS = "experts"
HEAD = "lm_head"
#: Projections of LFM2 by the end of their names, and what other families call them.
_OTHER_NAMES = {
    "self_attn.out_proj": "o_proj",
    "feed_forward.w1": "gate_proj",
    "feed_forward.w2": "down_proj",
    "feed_forward.w3": "up_proj",
}
NO_LAYER = -1  # the head's

#: Projections of the same inputs, which are one product if they have one form, by the name of the product.
MERGED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
}

MXFP4_BLOCK = 32  # inputs that share a scale
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_INT4 = {AWQ, GPTQ, PACKED}
_DUMMY_SCALES = {AWQ: "F16", GPTQ: "F16", PACKED: "BF16"}  # dtypes that tools write


class Methods(NamedTuple):
    """The classes of a form, "module.Class" below runner.models.quantization."""

    linear: str
    experts: str


METHODS: dict[str, Methods] = {
    "fp8": Methods("fp8.Fp8LinearMethod", "fp8_experts.Fp8Experts"),
    "mxfp4": Methods("unquantized.UnquantizedLinearMethod", "biased_experts.BiasedExperts"),
    "e2m1": Methods("four_bits.FourBitLinearMethod", "four_bit_experts.FourBitExpertsMethod"),
    "int4": Methods("four_bits.FourBitLinearMethod", "four_bit_experts.FourBitExpertsMethod"),
}


def is_linear(name: str) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear layer, or of one expert's."""
    return name.endswith(_LINEARS)


def fp8_blocks(options: LayerForm | Mapping[str, Any]) -> tuple[int, int]:
    """Return outputs and inputs that share a scale; (1, 0): one output, all inputs. Scales per tensor count as such.

    ``options`` is a form, or the quantization_config of a checkpoint whose first rule says it.
    """
    if isinstance(options, LayerForm):
        return options.rows, options.group
    rules = storage_rules(str(options.get("quant_method")), options)
    return _fp8_block(rules[0]) if rules else (1, 0)


def _fp8_block(rule: StorageRule) -> tuple[int, int]:
    rows, columns = rule.block
    return (rows, columns) if columns else (1, 0)


def layer_part(name: str, num_layers: int, predictor: str) -> tuple[int, str] | None:
    """Return the layer and the projection of a weight, ``EXPERTS`` for those of experts; None for other weights.

    The head is in ``NO_LAYER``.

    ``name`` is that of a causal model. ``predictor`` begins the names of the layer behind the last one.
    """
    if name == f"{HEAD}.weight":
        return NO_LAYER, HEAD
    is_fused = name.endswith(FUSED_EXPERTS)
    if not is_fused and not is_linear(name):
        return None
    match = _LAYER.match(name)
    if match is not None:
        layer = int(match[1])
    elif predictor and name.startswith(predictor):
        layer = num_layers
    else:
        return None
    if is_fused or ".experts." in name:
        return layer, EXPERTS
    *_, module, part, _ = name.split(".")
    return layer, _OTHER_NAMES.get(f"{module}.{part}", part)


def form_of(weight: QuantizedWeight) -> LayerForm | None:
    """Return the form in which V2 can keep a stored weight; None if it is dequantized."""
    form = form_of_rule(weight.rule, weight.scale_dtype)
    if form is None or not form.is_four_bits:
        return form
    if not form.fits(weight.shape[-1]):
        return None
    return msgspec.structs.replace(form, has_zeros=weight.zero_points is not None)  # stored ones are always used


def form_of_rule(rule: StorageRule, scale_dtype: str = "") -> LayerForm | None:
    """Return the form of all weights that a rule describes; ``scale_dtype`` is that of their scales, where known."""
    if rule.packing == quantized_weights.MXFP4:
        return LayerForm("mxfp4", group=MXFP4_BLOCK, scale_dtype="U8")
    if rule.packing == PLAIN:
        if rule.dtype != "F8_E4M3" or rule.has_zero_points:
            return None
        rows, group = _fp8_block(rule)
        return LayerForm("fp8", rows, group)
    if rule.packing in (FP4, FP4_PACKED):
        (dtype,) = rule.scale_dtypes
        return LayerForm("e2m1", group=rule.block[1], scale_dtype=dtype, has_output_scales=rule.has_global_scale)
    if rule.packing not in _INT4 or rule.bits != 4:
        return None
    return LayerForm(
        "int4",
        group=rule.block[1],
        scale_dtype=scale_dtype or _DUMMY_SCALES[rule.packing],
        has_zeros=rule.has_zero_points,
        has_order=rule.has_group_index,
    )
