"""Quantizes unquantized weights to FP8 while they are read: E4M3 with a scale per output.

    scale[output] = max |weight[output]| / 448        value = weight / scale, rounded to the nearest E4M3

These are the scales of llm-compressor and vLLM for weights per channel. The results have the interface of slices of
safetensors. They have no origin in the file, so that patches and peers do not take them for the stored tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LARGEST = 448.0  # largest value of E4M3
_SMALLEST_SCALE = 1e-12  # scale of an output whose weights are all zero
_PART = 1 << 23  # values that are in float32 at a time


class _OfRows:
    """A part of an unquantized weight [outputs, inputs], ``source``."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def _ranges(self, index: Any) -> tuple[range, slice]:
        """Return the rows and columns of an index: slices without steps, or ``...``."""
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        rows, columns = (*given, slice(None), slice(None))[:2]
        return range(*rows.indices(self._source.get_shape()[0])), columns

    def _parts(self, rows: range) -> list[range]:
        height = max(1, _PART // max(1, self._source.get_shape()[1]))
        return [rows[start : start + height] for start in range(0, len(rows), height)]

    def _read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return whole rows in float32, and their scales [rows, 1]: inputs of other tensor shards count."""
        values: Tensor = self._source[rows.start : rows.stop].float()
        return values, values.abs().amax(1, keepdim=True).div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)


class QuantizedRows(_OfRows):
    def get_shape(self) -> list[int]:
        return list(self._source.get_shape())

    def get_dtype(self) -> str:
        return "F8_E4M3"

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = self._ranges(index)
        quantized_parts = []
        for part in self._parts(rows):
            values, scales = self._read(part)
            quantized_parts.append(values.div_(scales).clamp_(-_LARGEST, _LARGEST)[:, columns].to(torch.float8_e4m3fn))
        return torch.cat(quantized_parts) if len(quantized_parts) != 1 else quantized_parts[0]


class ScalesOfRows(_OfRows):
    def get_shape(self) -> list[int]:
        return [self._source.get_shape()[0], 1]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = self._ranges(index)
        scales = [self._read(part)[1] for part in self._parts(rows)]
        return (torch.cat(scales) if len(scales) != 1 else scales[0])[:, columns]
