"""Linear layers, and the number format they compute in.

On a GPU, and on CPUs with bfloat16 arithmetic (AVX512-BF16, AMX), a model computes in its own dtype. Other CPUs emulate
16-bit products: measured on a Cascade Lake core (2.5 GHz, torch 2.13), bfloat16 GEMMs run at 25 GFLOP/s and float32
ones at 140, so there weights are widened to float32 once, when they are loaded. That costs twice the memory, and at a
single row, which costs what reading the weights costs, some time: a step of a 27 M model takes 15.5 ms, where keeping a
bfloat16 copy for single rows would take 13.6. But then a request's tokens would depend on whether it was alone, and a
seeded request must give the same tokens whatever else is in the batch.

On CPUs the weights are kept in oneDNN's blocked format, the one torch.compile's CPU back end uses. Measured on the same
core in float32 against ``F.linear`` on the plain weight: 1.0 × at 1 token, 1.9 × as fast at 8, 1.4 × at 64 and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_BATCH_HINT = 32  # tokens; oneDNN picks the blocking for it, and takes any other number too


@dataclass(frozen=True)
class Placement:
    """Where tensors live and what they compute in."""

    device: torch.device
    dtype: torch.dtype


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for a model served in ``dtype``; see the module's docstring."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    cpu: Any = torch.cpu
    if dtype == torch.bfloat16 and (cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()):
        return dtype
    if dtype == torch.float16 and cpu._is_amx_fp16_supported():
        return dtype
    return torch.float32


class Linear:
    """y = x Wᵀ + b for x [tokens, in_features]. Fill ``weight`` and ``bias`` first, then ``seal``, then call."""

    def __init__(self, in_features: int, out_features: int, bias: bool, place: Placement) -> None:
        self.weight = torch.empty(out_features, in_features, device=place.device, dtype=place.dtype)
        self.bias = torch.empty(out_features, device=place.device, dtype=place.dtype) if bias else None
        self._packed: Tensor | None = None

    def seal(self) -> None:
        """Bring the weight into the form it is used in. On CPUs the plain weight is dropped."""
        if self.weight.device.type == "cpu" and torch._C._has_mkldnn:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_BATCH_HINT)
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y
