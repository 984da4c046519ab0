"""Choose the dtype of the KV cache, and the scales of an FP8 KV cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pdserve.checkpoint.kv_scales import read_kv_scales
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution.resolved import Resolved
from pdserve.errors import ConfigError, shown
from pdserve.kv.layout import FP8_E4M3, UNSCALED, KVScales
from pdserve.model.model_config import ModelConfig

_LEAST_CAPABILITY = (8, 9)  # compute capability of the first NVIDIA GPUs that convert to and from E4M3
#: The scheme of compressed-tensors that is an FP8 cache with static scales.
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def choose_kv_dtype(options: NodeOptions, device: DeviceInfo, model: ModelConfig, dtype: str) -> Resolved[str]:
    """Return the dtype of the cache for a model served in ``dtype``."""
    if options.kv_cache_dtype == "auto":
        return Resolved(dtype, "the model's")
    spec = model.kv_cache_spec(dtype)
    if not spec.has_fp8:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype}: {model.architecture} keeps KV of the kind {spec.kind}, which no "
            "attention backend reads in FP8; use auto"
        )
    if device.capability is not None and device.capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype}: {device.name} has compute capability "
            f"{'.'.join(map(str, device.capability))}, FP8 needs {'.'.join(map(str, _LEAST_CAPABILITY))} (Ada, Hopper) "
            "or newer; use auto"
        )
    return Resolved(FP8_E4M3)


def choose_kv_scales(
    options: NodeOptions, model_dir: Path, model: ModelConfig, kv_dtype: str
) -> Resolved[tuple[KVScales, ...]]:
    """Return the scales of the model's ``kv_layers``: the checkpoint's, else 1.0; empty unless the cache is FP8."""
    if kv_dtype != FP8_E4M3:
        return Resolved(())
    scheme = model.quantization.get("kv_cache_scheme") or {}
    unlike = [name for name, value in _SCHEME.items() if isinstance(scheme, dict) and scheme.get(name, value) != value]
    if not isinstance(scheme, dict) or unlike:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype}: the checkpoint's kv_cache_scheme is {shown(scheme)}; supported "
            f"is {_SCHEME}. Use auto"
        )
    scales = read_kv_scales(read_headers(model_dir), model.kv_layers) if options.reads_weights else ()
    reason = "the checkpoint's" if scales else "the checkpoint has none"
    scales = scales or (UNSCALED,) * len(model.kv_layers)
    return Resolved(scales, reason, shown=describe_scales(scales))


def describe_scales(scales: tuple[KVScales, ...]) -> str:
    """Return a text that differs for unlike scales: "none" without an FP8 cache, else their range and digest."""
    if not scales:
        return "none"
    if set(scales) == {UNSCALED}:
        return "1.0"
    k = [layer.k for layer in scales]
    v = [layer.v for layer in scales]
    digest = hashlib.sha256(msgspec.json.encode(scales)).hexdigest()[:8]
    return f"k {min(k):.4g} … {max(k):.4g}, v {min(v):.4g} … {max(v):.4g} in {len(scales)} layers ({digest})"
