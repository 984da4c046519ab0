"""The weight formats that nodes can load, and the memory each takes.

A format either has layers of its own in runner/models/quantization, or its weights are dequantized while they are
loaded: then its ``storage_rules`` say how to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdserve.checkpoint.quantized_weights import (
    AWQ,
    FP4,
    FP4_PACKED,
    GPTQ,
    MXFP4,
    PACKED,
    PLAIN,
    StorageRule,
)
from pdserve.errors import ConfigError, shown
from pdserve.kv.layout import DTYPE_BYTES

UNQUANTIZED = "unquantized"
FP8_AT_LOAD = "fp8_at_load"  # unquantized in the checkpoint, FP8 with a scale per output in memory
NVFP4_AT_LOAD = "nvfp4_at_load"  # unquantized in the checkpoint, E2M1 with a scale per 16 inputs and one per output
INT4_AT_LOAD = "int4_at_load"  # unquantized in the checkpoint, 4-bit integers with a scale per 128 inputs
_NOT_STORED = (UNQUANTIZED, FP8_AT_LOAD, NVFP4_AT_LOAD, INT4_AT_LOAD)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
_LARGEST_BLOCK = 1 << 20
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")  # MiniMax-M2 has the last one
#: ModelOpt's algorithms whose weights are read; MIXED_PRECISION names one of the others for each layer.
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_NVFP4_GROUP = 16  # inputs that share a scale
_MXFP4_GROUP = 32

_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_COMPRESSED_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")

Rules = tuple[StorageRule, ...]


class _Unsupported(Exception):
    """A variant of a known format."""


class WeightFormat(msgspec.Struct, frozen=True):
    linear_method: str = "unquantized.UnquantizedLinearMethod"  # "module.Class" below runner.models.quantization
    bytes_per_weight: Callable[[str], float] = DTYPE_BYTES.__getitem__  # linear layers, by the model's dtype
    storage_rules: Callable[[Mapping[str, Any]], Rules] | None = None  # raises _Unsupported; None: loaded as stored
    experts_method: str = "unquantized_experts.UnquantizedExperts"
    bytes_per_expert_weight: Callable[[str], float] | None = None  # None: as for linear layers

    def num_bytes(self, linear: int, experts: int, dtype: str) -> int:
        """Return the bytes of weights of linear layers and of experts."""
        of_experts = self.bytes_per_expert_weight or self.bytes_per_weight
        return int(linear * self.bytes_per_weight(dtype) + experts * of_experts(dtype))


def _choice(options: Mapping[str, Any], name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    value = options.get(name)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if not isinstance(value, str | int | None) or value not in supported:
        raise _Unsupported(f"{name} {shown(value)}; supported are {', '.join(map(str, supported))}")
    return value


def _block(value: Any, name: str) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(part) for part in value.split("x") if part.isdecimal()]
    if not (isinstance(value, list) and len(value) == 2 and all(_is_size(size) for size in value)):
        raise _Unsupported(f"{name} {shown(value)}; it must be two numbers of rows and columns, such as 128 and 128")
    return value[0], value[1]


def _group_size(options: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return the columns that share a scale; 0 is all of them."""
    size: Any = default if options.get(name) is None else options[name]
    if size == -1:
        return 0
    if not _is_size(size):
        raise _Unsupported(f"{name} {shown(size)}; it must be -1 or a number of columns up to {_LARGEST_BLOCK}")
    return int(size)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_BLOCK


def _fp8(options: Mapping[str, Any]) -> Rules:
    """DeepSeek, Qwen and transformers (blocks), AutoFP8 and Mistral (per tensor), FBGEMM (per channel)."""
    _choice(options, "fmt", _E4M3, "e4m3")
    _choice(options, "expert_dtype", ("fp8",), "fp8")
    block = options.get("weight_block_size")
    blocks = ((0, 0), (1, 0)) if block is None else (_block(block, "weight_block_size"),)
    return tuple(StorageRule(packing=PLAIN, dtype="F8_E4M3", bits=8, block=size) for size in blocks)


def _modelopt(options: Mapping[str, Any]) -> Rules:
    """NVIDIA's ModelOpt. Scales of activations (``input_scale``) are not used."""
    algorithm = _choice(options, "quant_algo", tuple(map(str.lower, MODELOPT_ALGORITHMS)))
    if algorithm == "mixed_precision":
        layers = options.get("quantized_layers")
        if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
            raise _Unsupported(f"quantized_layers {shown(layers)}; it must name the algorithm of each layer")
        rules = [rule for layer in layers.values() for rule in _modelopt_layer(layer)]
        return tuple(dict.fromkeys(rules))
    return _modelopt_layer({**options, "quant_algo": algorithm})


def _modelopt_layer(options: Mapping[str, Any]) -> Rules:
    """FP8 per tensor or per channel, or NVFP4."""
    algorithms = tuple(name.lower() for name in MODELOPT_ALGORITHMS if name != "MIXED_PRECISION")
    if "nvfp4" not in _choice(options, "quant_algo", algorithms):
        return tuple(StorageRule(packing=PLAIN, dtype="F8_E4M3", bits=8, block=block) for block in ((0, 0), (1, 0)))
    _choice(options, "group_size", (_NVFP4_GROUP,), _NVFP4_GROUP)
    return (_nvfp4(FP4),)


def _nvfp4(packing: str) -> StorageRule:
    return StorageRule(
        packing=packing,
        dtype="U8",
        bits=4,
        block=(1, _NVFP4_GROUP),
        scale_dtypes=("F8_E4M3",),
        has_global_scale=True,
    )


def _awq(options: Mapping[str, Any]) -> Rules:
    given = {"bits": options.get("w_bit"), "group_size": options.get("q_group_size"), **options}
    version = next((name for name in ("version", "format", "checkpoint_format") if options.get(name)), "version")
    _choice(options, version, ("gemm",), "gemm")
    _choice(options, "zero_point", (True,), True)
    bits = _choice(given, "bits", (4,), 4)
    block = 1, _group_size(given, "group_size", 128)
    return (StorageRule(packing=AWQ, dtype="I32", bits=bits, block=block, has_zero_points=True),)


def _gptq(options: Mapping[str, Any]) -> Rules:
    name = "checkpoint_format" if options.get("checkpoint_format") else "format"
    version = _choice(options, name, ("gptq", "gptq_v2"), "gptq")
    _choice(options, "is_marlin_format", (False,), False)
    _choice(options, "pack_dtype", ("int32",), "int32")
    modules = options.get("dynamic") or {}
    if not isinstance(modules, dict) or not all(isinstance(own, dict) for own in modules.values()):
        raise _Unsupported(f"dynamic {shown(modules)}; it must be an object of modules' options")
    own_options = [own for name, own in modules.items() if not name.startswith("-")]  # "-" leaves modules out
    meta = options.get("meta")
    quantizer = shown(meta.get("quantizer")) if isinstance(meta, dict) else ""
    offset = "" if version == "gptq_v2" else "word" if "gptqmodel" in quantizer else "field"
    return tuple(dict.fromkeys(_gptq_rule({**options, **own}, offset) for own in ({}, *own_options)))


def _gptq_rule(options: Mapping[str, Any], offset: str) -> StorageRule:
    """Shapes of zeros and group indices tell weights of other bits and groups apart."""
    group_size = _group_size(options, "group_size")
    return StorageRule(
        packing=GPTQ,
        dtype="I32",
        bits=_choice(options, "bits", (4, 8)),
        block=(1, group_size),
        has_zero_points=True,
        has_group_index=options.get("desc_act") is True and group_size > 0,
        zero_point_offset=offset,
    )


def _auto_round(options: Mapping[str, Any]) -> Rules:
    """Intel's AutoRound: tensors in GPTQ's or AWQ's form, with groups in order."""
    packing = options.get("packing_format") or options.get("backend") or "auto_round:auto_gptq"
    form = next((form for form in (GPTQ, AWQ) if isinstance(packing, str) and packing.endswith(form)), None)
    if form is None:
        raise _Unsupported(f"packing_format {shown(packing)}; supported are auto_round:auto_gptq, auto_round:auto_awq")
    if options.get("act_bits") not in (None, 16, 32):
        raise _Unsupported(f"act_bits {shown(options['act_bits'])}; supported are activations of 16 bits")
    modules = options.get("extra_config") or {}
    if not isinstance(modules, dict) or not all(isinstance(module, dict) for module in modules.values()):
        raise _Unsupported(f"extra_config {shown(modules)}; it must be an object of modules' options")
    own_options = [module for module in modules.values() if module.get("bits") not in (16, 32)]
    names = ("bits", "group_size", "data_type")
    variants = [{name: own.get(name) or options.get(name) for name in names} for own in ({}, *own_options)]
    rules: list[StorageRule] = []
    for variant in variants:
        _choice(variant, "data_type", ("int",), "int")
        rules += _awq({**variant, "zero_point": True}) if form == AWQ else _gptq(variant)
    return tuple(dict.fromkeys(rules))


def _mxfp4(options: Mapping[str, Any]) -> Rules:
    return (StorageRule(packing=MXFP4, dtype="U8", bits=4, block=(1, _MXFP4_GROUP), scale_dtypes=("U8",)),)


def _compressed_tensors(options: Mapping[str, Any]) -> Rules:
    groups = options.get("config_groups")
    sparsity = options.get("sparsity_config") or {}
    if options.get("kv_cache_scheme") and groups is None:  # only the KV cache is quantized
        groups = {}
    if (
        not isinstance(groups, dict)
        or not all(isinstance(group, dict) for group in groups.values())
        or not (groups or options.get("kv_cache_scheme"))
    ):
        raise _Unsupported(f"config_groups {shown(groups)}; it must be an object of groups")
    if not isinstance(sparsity, dict) or (sparsity.get("format") or "dense") != "dense":
        raise _Unsupported(f"sparsity_config {shown(sparsity)}; supported are dense weights")
    if options.get("transform_config"):
        raise _Unsupported("a transform_config; supported are weights without transforms")
    rules = dict.fromkeys(
        _compressed_group({**group, "format": group.get("format") or options.get("format")})
        for group in groups.values()
        if group.get("weights") is not None
    )
    groups = {
        bits: {rule.block[1] for rule in rules if rule.packing == PACKED and rule.bits == bits} for bits in (4, 8)
    }
    if any(four in (0, 2 * eight) or not eight for four in groups[4] for eight in groups[8]):
        raise _Unsupported(
            "pack-quantized groups of different num_bits whose shapes are equal; supported are group sizes that tell "
            "them apart"
        )
    return tuple(rules)


def _compressed_group(group: Mapping[str, Any]) -> StorageRule:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise _Unsupported(f"weights {shown(weights)}; it must be an object")
    stored = _choice(group, "format", (*_COMPRESSED_FORMATS, *_COMPRESSED_FP4))
    is_float = _choice(weights, "type", ("int", "float"), "int") == "float"
    if stored in _COMPRESSED_FP4:
        return _compressed_fp4(weights, stored)
    if (stored == "float-quantized" and not is_float) or (stored in ("int-quantized", "pack-quantized") and is_float):
        raise _Unsupported(f"weights of type {shown(weights.get('type'))} in the format {stored}")
    bits = _choice(weights, "num_bits", (8,) if is_float else (4, 8), 8)
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = _choice(weights, "strategy", ("tensor", "channel", "group", "block"), default)
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy)
    if strategy == "group":
        block = 1, _group_size(weights, "group_size")
    packed = stored == "pack-quantized"
    return StorageRule(
        packing=PACKED if packed else PLAIN,
        dtype="I32" if packed else "F8_E4M3" if is_float else "I8",
        bits=bits,
        block=block or _block(weights.get("block_structure"), "block_structure"),
        has_zero_points=weights.get("symmetric") is False,
        has_group_index=weights.get("actorder") in ("group", "dynamic"),
    )


def _compressed_fp4(weights: Mapping[str, Any], stored: str) -> StorageRule:
    """NVFP4, or MXFP4 of linear layers, which has no scale of the tensor."""
    rule = _nvfp4(FP4_PACKED)
    if stored == "mxfp4-pack-quantized":
        rule = StorageRule(packing=FP4_PACKED, dtype="U8", bits=4, block=(1, _MXFP4_GROUP), scale_dtypes=("U8",))
    _choice(weights, "type", ("float",), "float")
    _choice(weights, "num_bits", (4,), 4)
    _choice(weights, "group_size", (rule.block[1],), rule.block[1])
    _choice(weights, "symmetric", (True,), True)
    return rule


#: Formats by quant_method of a checkpoint's quantization_config, which names none of the first four.
WEIGHT_FORMATS: dict[str, WeightFormat] = {
    **dict.fromkeys(_NOT_STORED, WeightFormat(storage_rules=lambda options: ())),
    "fp8": WeightFormat(storage_rules=_fp8),
    "fbgemm_fp8": WeightFormat(storage_rules=_fp8),
    "compressed-tensors": WeightFormat(storage_rules=_compressed_tensors),
    "awq": WeightFormat(storage_rules=_awq),
    "gptq": WeightFormat(storage_rules=_gptq),
    "auto-round": WeightFormat(storage_rules=_auto_round),
    "mxfp4": WeightFormat(storage_rules=_mxfp4),
    "modelopt": WeightFormat(storage_rules=_modelopt),
}


def stored_formats() -> list[str]:
    """Return the names that a checkpoint may give."""
    return [name for name in WEIGHT_FORMATS if name not in _NOT_STORED]


def storage_rules(weight_format: str, options: Mapping[str, Any]) -> Rules | None:
    """Return how the weights of a format are stored; None: its own layers load them as they are.

    ``options`` is the checkpoint's quantization_config. Raises ConfigError for a variant that is not supported.
    """
    rules = WEIGHT_FORMATS[weight_format].storage_rules
    try:
        return None if rules is None else rules(options)
    except _Unsupported as exc:
        raise ConfigError(f"has {weight_format} weights with {exc}") from exc
