"""Stored 4-bit weights in one form, with the interface of slices of safetensors, whatever the tool has packed.

    X.weight               uint8 [outputs, inputs / 2]   input 2i in the low four bits, 2i + 1 in the high ones
    X.weight_group_scale   [outputs, groups]             in the stored dtype
    X.weight_zero          uint8 [outputs, groups]       of int4 with zeros
    X.weight_output_scale  float32 [outputs]             of E2M1 with a scale per tensor
    X.weight_order         int32 [inputs]                the input of each column, if groups are in another order

They have no origin in the file, so that patches and peers do not take them for the stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.checkpoint.quantized_weights import AWQ, FP4, FP4_PACKED, GPTQ, PACKED, QuantizedWeight
from pdserve.errors import CheckpointError
from pdserve.model.quantization.layer_form import LayerForm
from runner.models.quantization.dequantize import (
    check_stored_shape,
    cover,
    fields,
    global_factor,
    in_awq_order,
    within,
    zero_fields,
)

_PER_WORD = 8  # codes
_BYTES_PER_WORD = 4
_PART = 1 << 25  # codes that are unpacked at a time
_WHOLE = 1 << 62  # a tensor is read at once, because AWQ and GPTQ store inputs first


class Names(NamedTuple):
    """Names of the tensors behind that of the weight."""

    scales: str = "_group_scale"
    zeros: str = "_zero"
    output_scales: str = "_output_scale"
    order: str = "_order"


NAMES = Names()


def four_bit_slices(
    name: str, weight: QuantizedWeight, form: LayerForm, stored: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return the tensors of a weight that stays in ``form``; ``stored`` has the slices of the file by name."""
    parts = _Parts(name, weight, form, stored, device)
    slices: dict[str, Any] = {name: CodeSlice(parts), name + NAMES.scales: _ScaleSlice(parts)}
    if form.has_zeros:
        slices[name + NAMES.zeros] = _ZeroSlice(parts)
    if form.has_output_scales:
        slices[name + NAMES.output_scales] = _OutputScaleSlice(parts)
    if form.has_order:
        slices[name + NAMES.order] = _OrderSlice(parts)
    return slices


def random_value(name: str, dtype: torch.dtype, has_factor: bool) -> float | None:
    """Return the value of a tensor that is the same everywhere in random weights; None for codes.

    ``has_factor``: the weight has output scales. Weights then have a deviation of about 0.02.
    """
    if name.endswith(NAMES.zeros):
        return 8.0
    if name.endswith(NAMES.output_scales):
        return 0.02 / 3  # random E2M1 values have a deviation of 2.9
    if name.endswith(NAMES.scales):
        if dtype == torch.uint8:
            return 120.0  # 2^-7
        return 1.0 if dtype == torch.float8_e4m3fn or has_factor else 0.02 / 4.6
    return None


class _Parts:
    """The stored tensors of one weight."""

    def __init__(
        self, name: str, weight: QuantizedWeight, form: LayerForm, stored: Mapping[str, Any], device: torch.device
    ) -> None:
        self.name = name
        self.weight = weight
        self.form = form
        self.stored = stored
        self.device = device

    def read(self, name: str, *index: slice) -> Tensor:
        part: Tensor = self.stored[name][index or ...]
        return part.to(self.device)

    @cached_property
    def order(self) -> Tensor | None:
        """The input of each column in memory; None: as stored. Raises CheckpointError for groups that are none."""
        check_stored_shape(self.weight, self.stored)
        index = self.weight.group_index
        groups = self.weight.grid[1]
        if index is None or groups == 1:
            return self._unchanged
        stored = self.read(index).long()
        inputs = self.weight.shape[-1]
        width = self.weight.block[1]
        consecutive = torch.arange(inputs, device=self.device) // width
        if bool((stored == -1).all()) or torch.equal(stored, consecutive):
            return self._unchanged
        order = stored.argsort(stable=True)
        if not torch.equal(stored[order], consecutive):
            raise CheckpointError(
                f"{index} does not name each of the {groups} groups of {self.name} {width} times; download the "
                "checkpoint again"
            )
        if not self.form.has_order:
            raise CheckpointError(
                f"{index} has groups of inputs in another order, and quantization_config does not say so (desc_act, "
                "actorder). Correct it, or choose V1 (PDSERVE_USE_V2_MODEL_RUNNER=0), which dequantizes the weights"
            )
        return order

    @property
    def _unchanged(self) -> Tensor | None:
        return torch.arange(self.weight.shape[-1], device=self.device) if self.form.has_order else None


class _Slice:
    at_once = _WHOLE  # values to read at a time

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self._weight = parts.weight

    def get_shape(self) -> list[int]:
        return [self._weight.shape[0], self._weight.grid[1]]

    def get_dtype(self) -> str:
        return "U8"

    def _ranges(self, index: Any) -> list[range]:
        """Return the range in each dimension of an index: slices without steps, or ``...``."""
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        given += (slice(None),) * (len(self.get_shape()) - len(given))
        return [range(*part.indices(size)) for part, size in zip(given, self.get_shape(), strict=True)]


class CodeSlice(_Slice):
    """Codes, two in a byte."""

    is_quantized = True  # in the file

    def get_shape(self) -> list[int]:
        return [self._weight.shape[0], self._weight.shape[1] // 2]

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = self._ranges(index)
        order = self._parts.order
        if order is None:
            return self._codes(rows, columns)
        codes = separated(self._codes(rows, range(self.get_shape()[1])))
        return paired(codes.index_select(1, order))[:, columns.start : columns.stop]

    def _codes(self, rows: range, columns: range) -> Tensor:
        """Return bytes ``columns`` of ``rows``, in the order of the file."""
        packing = self._weight.rule.packing
        name = self._weight.values
        read = self._parts.read
        if packing in (FP4, FP4_PACKED):
            return read(name, _slice(rows), _slice(columns))
        mine = within(columns, _BYTES_PER_WORD)
        if packing == PACKED:
            return read(name, _slice(rows), cover(columns, _BYTES_PER_WORD)).contiguous().view(torch.uint8)[:, mine]
        if packing == GPTQ:
            words = read(name, cover(columns, _BYTES_PER_WORD), _slice(rows))
            return words.t().flatten().view(torch.uint8).view(len(rows), -1)[:, mine]
        assert packing == AWQ
        words = read(name, slice(2 * columns.start, 2 * columns.stop), cover(rows, _PER_WORD))
        width = max(1, _PART // (_PER_WORD * max(1, len(words))))
        codes = [paired(in_awq_order(fields(some, 4)).t()) for some in words.split(width, 1)]
        return torch.cat(codes)[within(rows, _PER_WORD)]


class _ScaleSlice(_Slice):
    def get_dtype(self) -> str:
        return self._weight.scale_dtype

    def __getitem__(self, index: Any) -> Tensor:
        rows, groups = self._ranges(index)
        if self._weight.rule.packing in (GPTQ, AWQ):
            return self._parts.read(self._weight.scales, _slice(groups), _slice(rows)).t()
        scales = self._parts.read(self._weight.scales).reshape(self._weight.grid)
        return scales[rows.start : rows.stop, groups.start : groups.stop]


class _ZeroSlice(_Slice):
    """Zeros as codes: those of signed values are moved by 8."""

    def __getitem__(self, index: Any) -> Tensor:
        rows, groups = self._ranges(index)
        assert self._weight.zero_points is not None
        zeros = zero_fields(self._weight, self._parts.read(self._weight.zero_points))
        return zeros[rows.start : rows.stop, groups.start : groups.stop]


class _OutputScaleSlice(_Slice):
    def get_shape(self) -> list[int]:
        return [self._weight.shape[0]]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        (rows,) = self._ranges(index)
        factor = global_factor(self._weight, self._parts.stored)
        assert factor is not None
        return factor.to(self._parts.device).expand(len(rows))


class _OrderSlice(_Slice):
    def get_shape(self) -> list[int]:
        return [self._weight.shape[1]]

    def get_dtype(self) -> str:
        return "I32"

    def __getitem__(self, index: Any) -> Tensor:
        order = self._parts.order
        assert order is not None
        return order.int()[index]


def separated(codes: Tensor) -> Tensor:
    """Return the codes [outputs, inputs] uint8 of pairs [outputs, inputs / 2]."""
    return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)


def paired(codes: Tensor) -> Tensor:
    """Undo ``separated``."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
