"""Device and dtypes of a rank's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorPlacement:
    """Device, storage dtype and compute dtype of a model's tensors."""

    device: torch.device
    stored: torch.dtype  # embeddings and linear weights as loaded: the dtype that the model is served in
    dtype: torch.dtype  # activations and products
    use_triton: bool = False


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in for a model served in ``dtype``.

    CPUs without 16-bit arithmetic (AVX512-BF16, AMX) compute in float32; see models/quantization/unquantized.py.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    cpu: Any = torch.cpu
    if dtype == torch.bfloat16 and (cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()):
        return dtype
    if dtype == torch.float16 and cpu._is_amx_fp16_supported():
        return dtype
    return torch.float32
