"""Static scales of an FP8 KV cache in a checkpoint: a number per layer for keys, and one for values.

    layers.0.self_attn.k_scale, .attn.k_scale, .k_proj.k_scale   and v_scale; AutoFP8, vLLM, ModelOpt
    layers.0.self_attn.k_proj.output_scale                       and v_proj; early compressed-tensors
    layers.0.self_attn.kv_scale                                  for both; early AutoFP8

These are the names that vLLM reads (``maybe_remap_kv_scale_name``).
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.checkpoint.files import open_regular
from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.errors import CheckpointError, shown
from pdserve.kv.layout import KVScales

_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d{1,6})\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)"
)
_LARGEST = 1e6
_REMEDY = "download the checkpoint again, or use --kv-cache-dtype auto"


def is_kv_scale(tensor: str) -> bool:
    """Whether a tensor of this name is a scale of the KV cache, which no layer loads."""
    return _NAME.fullmatch(tensor) is not None


def read_kv_scales(headers: Mapping[Path, Mapping[str, Tensor]], layers: Sequence[int]) -> tuple[KVScales, ...]:
    """Return the scales of each of ``layers``; empty if the checkpoint has none.

    Layers behind the model's predict further tokens and are left out. Raises CheckpointError for a tensor that is no
    positive number, and for a layer without its scale.
    """
    scales: dict[tuple[int, str], float] = {}
    wanted = set(layers)
    for path, tensors in headers.items():
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is not None and int(match[1]) in wanted:
                scale = _read(path, name, tensor)
                scales.update(((int(match[1]), plane), scale) for plane in match[2] or match[3])
    if not scales:
        return ()
    missing = [f"{plane}_scale of layer {layer}" for layer in layers for plane in "kv"
               if (layer, plane) not in scales]  # fmt: skip
    if missing:
        raise CheckpointError(f"the checkpoint has scales of an FP8 KV cache, but no {missing[0]}; {_REMEDY}")
    return tuple(KVScales(scales[layer, "k"], scales[layer, "v"]) for layer in layers)


def _read(path: Path, name: str, tensor: Tensor) -> float:
    if tensor.dtype not in ("F32", "BF16", "F16") or tensor.shape not in ((), (1,)):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has shape {shown(tensor.shape)} of {tensor.dtype}; an FP8 KV cache has one "
            f"scale per layer, in F32, BF16 or F16. Use --kv-cache-dtype auto"
        )
    with open_regular(path) as (fd, _):
        data = os.pread(fd, tensor.end - tensor.begin, tensor.begin)
    if tensor.dtype == "BF16":
        data = b"\0\0" + data  # the upper half of a float32
    scale = struct.unpack("<e" if tensor.dtype == "F16" else "<f", data)[0]
    if not 0.0 < scale < _LARGEST or not math.isfinite(1.0 / scale):
        raise CheckpointError(f"{path}: tensor {shown(name)} is {scale:g}; a scale is above 0. {_REMEDY}")
    return float(scale)
