"""Quantizes unquantized weights to 4 bits while they are read, rounded to the nearest value.

    int4    scale[group] = max |weight| / 7.5        code = weight / scale + 8, symmetric as of llm-compressor
    e2m1    factor[output] = max |weight| / (6 * 448), scale[group] = max |weight| / (6 * factor) in E4M3

Slices have the names and forms of ``four_bit_slices``, and no origin in the file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.model.quantization.layer_form import LayerForm
from runner.models.quantization.four_bit_slices import NAMES, paired

_LARGEST_E2M1 = 6.0
_LARGEST_E4M3 = 448.0
_INT4_STEPS = 7.5  # half of the 15 steps between -8 and 7
_ZERO = 8
_SMALLEST_FACTOR = 1e-20  # factor of an output whose weights are all zero
_PART = 1 << 23  # weights that are in float32 at a time
_WHOLE = 1 << 62  # a tensor is read at once
#: Midpoints of E2M1's values 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class _Quantized(NamedTuple):
    codes: Tensor  # [outputs, inputs / 2] uint8
    scales: Tensor  # [outputs, groups]
    factors: Tensor  # [outputs] float32


class LastWeight:
    """The weight that was quantized last: its tensors are loaded one after the other, and it is read once."""

    def __init__(self) -> None:
        self._last: tuple[Any, _Quantized] | None = None  # replaced as a whole, because threads share it

    def quantized(self, source: Any, rows: range, form: LayerForm) -> _Quantized:
        """Return whole rows of a source: inputs of other tensor shards count in the factor of an output."""
        key = id(source), rows
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        self._last = last = None  # free its memory
        weight = _quantized(source, rows, form)
        self._last = key, weight
        return weight


def four_bits_at_load(name: str, source: Any, form: LayerForm, last: LastWeight) -> dict[str, Any]:
    """Return slices of an unquantized weight [outputs, inputs], ``source``, in 4 bits."""
    slices: dict[str, Any] = {
        name: _CodeSlice(source, form, last),
        name + NAMES.scales: _ScaleSlice(source, form, last),
    }
    if form.has_output_scales:
        slices[name + NAMES.output_scales] = _FactorSlice(source, form, last)
    return slices


class _Slice:
    at_once = _WHOLE  # values to read at a time

    def __init__(self, source: Any, form: LayerForm, last: LastWeight) -> None:
        self._source = source
        self._form = form
        self._last = last

    def _rows(self, index: Any) -> tuple[_Quantized, slice]:
        """Return the rows of an index, which is slices without steps or ``...``, and the slice of columns."""
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        rows, columns = (*given, slice(None), slice(None))[:2]
        return self._last.quantized(
            self._source, range(*rows.indices(self._source.get_shape()[0])), self._form
        ), columns


class _CodeSlice(_Slice):
    def get_shape(self) -> list[int]:
        outputs, inputs = self._source.get_shape()
        return [outputs, inputs // 2]

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        weight, columns = self._rows(index)
        return weight.codes[:, columns]


class _ScaleSlice(_Slice):
    def get_shape(self) -> list[int]:
        outputs, inputs = self._source.get_shape()
        return [outputs, inputs // self._form.group]

    def get_dtype(self) -> str:
        return self._form.scale_dtype

    def __getitem__(self, index: Any) -> Tensor:
        weight, columns = self._rows(index)
        return weight.scales[:, columns]


class _FactorSlice(_Slice):
    def get_shape(self) -> list[int]:
        return [self._source.get_shape()[0]]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._rows(index)[0].factors


def _quantized(source: Any, rows: range, form: LayerForm) -> _Quantized:
    quantize = _to_e2m1 if form.kind == "e2m1" else _to_int4
    height = max(1, _PART // max(1, source.get_shape()[1]))
    starts = range(rows.start, max(rows.stop, rows.start + 1), height)
    parts = [quantize(source[start : min(start + height, rows.stop)].float(), form.group) for start in starts]
    return parts[0] if len(parts) == 1 else _Quantized(*map(torch.cat, zip(*parts, strict=True)))


def _to_int4(weight: Tensor, group: int) -> _Quantized:
    groups = weight.unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / _INT4_STEPS).bfloat16()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / divisors[:, :, None]).round_().add_(_ZERO).clamp_(0, 15)
    return _Quantized(paired(codes.flatten(1).to(torch.uint8)), scales, torch.ones_like(weight[:, 0]))


def _to_e2m1(weight: Tensor, group: int) -> _Quantized:
    factors = (weight.abs().amax(1) / (_LARGEST_E2M1 * _LARGEST_E4M3)).clamp_(min=_SMALLEST_FACTOR)
    groups = weight.unflatten(1, (-1, group)) / factors[:, None, None]
    scales = (groups.abs().amax(2) / _LARGEST_E2M1).clamp_(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    values = groups / divisors[:, :, None]
    codes = torch.bucketize(values.abs(), torch.tensor(_MIDPOINTS, device=weight.device))
    codes = codes.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    return _Quantized(paired(codes.flatten(1)), scales, factors)
