"""The weight format that config.json, or a file beside it, names: in the words of the tool that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.errors import ConfigError, shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.quantization.weight_formats import (
    MODELOPT_ALGORITHMS,
    SUPPORTED_DTYPES,
    UNQUANTIZED,
    storage_rules,
    stored_formats,
)

_FIELDS = ("quantization_config", "compression_config")  # early compressed-tensors wrote the second one
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")  # quant_method


def read_weight_format(fields: ConfigFields) -> tuple[str, dict[str, Any]]:
    """Return the format that ``quantization_config`` names, and its options.

    Raises CheckpointError for an unknown format, and for an unknown variant of a known one.
    """
    options = next((value for value in map(fields.get, _FIELDS) if value), None) or _modelopt_options(fields)
    options = options or _mlx_options(fields)
    if options is None:
        return UNQUANTIZED, {}
    name, options = _named(fields, options)
    if not isinstance(options, dict) or not isinstance(name, str) or name not in stored_formats():
        raise fields.error(f"describes a quantized checkpoint ({shown(name)}); {_supported()}")
    try:
        msgspec.msgpack.encode(options)  # the form that is sent to the ranks
    except OverflowError as exc:
        raise fields.error(f"has a number beyond 64 bits in quantization_config. {REMEDY}") from exc
    try:
        storage_rules(name, options)
    except ConfigError as exc:
        raise fields.error(f"{exc}. Choose a checkpoint without it, or an unquantized one") from exc
    return name, options


def _named(fields: ConfigFields, options: Any) -> tuple[Any, Any]:
    """Return the format's name here and its options. Raises CheckpointError for a tool that is not supported."""
    if not isinstance(options, dict):
        return options, options
    inner = options.get("quantization")  # ModelOpt's level in hf_quant_config.json
    options = {**options, **inner} if isinstance(inner, dict) and "quant_algo" in inner else options
    name = options.get("quant_method")
    if str(name).startswith("modelopt") or (name is None and "quant_algo" in options):  # older versions name no tool
        _check_modelopt(fields, options)
        return "modelopt", {**_with_kv_scheme(options), "quant_method": "modelopt"}
    if name in _AUTO_ROUND:
        return "auto-round", {**options, "quant_method": "auto-round"}
    if name is None and "bits" in options and "group_size" in options:
        raise fields.error(
            f"describes weights in Apple's MLX format ({shown(options['bits'])} bits), which is not supported; "
            f"{_supported()}"
        )
    if name is None:
        raise fields.error(f"has a quantization_config without quant_method; {_supported()}")
    return name, options


def _modelopt_options(fields: ConfigFields) -> dict[str, Any] | None:
    """Return the options that ModelOpt writes beside config.json; None without any for weights."""
    path = fields.path.parent / "hf_quant_config.json"
    options = ConfigFields(path).get("quantization") if path.exists() else None
    if not isinstance(options, dict) or options.get("quant_algo") is None:
        return None
    return {**options, "quant_method": "modelopt"}


def _mlx_options(fields: ConfigFields) -> dict[str, Any] | None:
    """Return the options of MLX, whose first versions wrote no quantization_config."""
    options = fields.values.get("quantization")
    return options if isinstance(options, dict) and "group_size" in options else None


def _with_kv_scheme(options: dict[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's options with its algorithm for the KV cache as the scheme that its choice reads."""
    algorithm = options.get("kv_cache_quant_algo")
    return options if algorithm in (None, "FP8") else {"kv_cache_scheme": {"type": shown(algorithm)}, **options}


def _check_modelopt(fields: ConfigFields, options: Mapping[str, Any]) -> None:
    """Raise CheckpointError for weights that ModelOpt quantized with an algorithm that is unknown here."""
    algorithm = options.get("quant_algo")
    if algorithm not in MODELOPT_ALGORITHMS:
        raise fields.error(
            f"describes weights that ModelOpt quantized ({shown(algorithm)}), which are not supported; supported of "
            f"ModelOpt are {', '.join(MODELOPT_ALGORITHMS)}; {_supported()}"
        )


def _supported() -> str:
    formats = [*SUPPORTED_DTYPES, *stored_formats()]
    return f"supported are {', '.join(formats)} weights. Choose a checkpoint in one of these formats"
