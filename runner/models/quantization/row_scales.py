"""The scales of a weight that stays in FP8, with the interface of a slice of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pdserve.checkpoint.quantized_weights import QuantizedWeight


class RowScales:
    """float32 [..., outputs, groups of inputs]: a row for each output, whatever the blocks of the checkpoint."""

    def __init__(self, weight: QuantizedWeight, parts: Mapping[str, Any]) -> None:
        """``parts`` has the slices of the stored tensors by name."""
        self._weight = weight
        self._parts = parts

    def get_shape(self) -> list[int]:
        return [*self._weight.shape[:-1], self._weight.grid[1]]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        weight = self._weight
        scales: Tensor = self._parts[weight.scales][...].float().reshape(*weight.shape[:-2], *weight.grid)
        rows = scales.repeat_interleave(weight.block[0], -2)[..., : weight.shape[-2], :]
        return rows[index]
