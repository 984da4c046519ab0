"""Dequantize weights while they are read: stored tensors in, slices of the weight in the model's dtype out.

A weight is computed in parts of some million values, on the device where it will be used, so it never exists in
float32 as a whole. pdserve/checkpoint/quantized_weights.py describes the packings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pdserve.checkpoint.quantized_weights import (
    AWQ,
    FP4,
    FP4_PACKED,
    GPTQ,
    MXFP4,
    PACKED,
    PLAIN,
    QuantizedWeight,
)
from pdserve.errors import CheckpointError

_PART = 1 << 23  # values computed at a time
_WORD = 32  # bits
_MX_BLOCK = 32  # values of an MXFP4 block
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


class DequantizedSlice:
    """A quantized weight with the interface of a slice of safetensors: nothing is read before it is indexed."""

    is_quantized = True  # in the file

    def __init__(
        self, name: str, weight: QuantizedWeight, parts: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        """``parts`` has the slices of the stored tensors by name."""
        self._name = name
        self._weight = weight
        self._parts = parts
        self._device = device
        self._dtype = dtype

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def get_dtype(self) -> str:
        return str(self._dtype)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part [rows, columns] or [matrices, rows, columns]; ``index`` is slices without steps, or ``...``.

        Raises CheckpointError for a group index or a shape that contradicts the weight.
        """
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        given += (slice(None),) * (len(self._weight.shape) - len(given))
        ranges = [range(*part.indices(size)) for part, size in zip(given, self._weight.shape, strict=True)]
        out = torch.empty([len(part) for part in ranges], dtype=self._dtype, device=self._device)
        check_stored_shape(self._weight, self._parts)
        if len(ranges) == 2:
            self._fill(out, None, *ranges)
        else:
            for position, matrix in enumerate(ranges[0]):
                self._fill(out[position], matrix, *ranges[1:])
        return out

    def _fill(self, out: Tensor, matrix: int | None, rows: range, columns: range) -> None:
        if self._weight.rule.packing == MXFP4:
            rows, columns = columns, rows
            out = out.t()
        scales = self._scales(matrix)
        zeros = self._zero_points(matrix)
        factor = global_factor(self._weight, self._parts)
        factor = None if factor is None else factor.to(self._device)
        groups = self._groups(columns)
        height = max(1, _PART // max(1, len(columns)))
        for start in range(0, len(rows), height):
            some = rows[start : start + height]
            values = self._values(matrix, some, columns)
            blocks = torch.arange(some.start, some.stop, device=self._device) // self._weight.block[0]
            parts = values.view(len(some), len(groups), -1)
            if zeros is not None:
                parts -= _pick(zeros, blocks, groups)
            parts *= _pick(scales, blocks, groups)
            if factor is not None:
                values *= factor
            out[start : start + height] = values

    def _values(self, matrix: int | None, rows: range, columns: range) -> Tensor:
        """Return values [rows, columns] float32 before zero points and scales."""
        rule = self._weight.rule
        name = self._weight.values
        if rule.packing == PLAIN:
            return self._read(name, matrix, _slice(rows), _slice(columns)).float()
        if rule.packing == MXFP4:
            blocks = self._read(name, matrix, _slice(rows), cover(columns, _MX_BLOCK))
            return _fp4(blocks)[:, within(columns, _MX_BLOCK)].contiguous()
        if rule.packing in (FP4, FP4_PACKED):
            return _fp4(self._read(name, None, _slice(rows), cover(columns, 2)))[:, within(columns, 2)].contiguous()
        per_word = _WORD // rule.bits
        if rule.packing == AWQ:
            words = self._read(name, None, _slice(columns), cover(rows, per_word))
            return in_awq_order(fields(words, rule.bits))[:, within(rows, per_word)].t().contiguous().float()
        if rule.packing == GPTQ:
            words = self._read(name, None, cover(columns, per_word), _slice(rows))
            values = fields(words, rule.bits).view(*words.shape, per_word).transpose(0, 1).flatten(1)
            return values[:, within(columns, per_word)].contiguous().float()
        words = self._read(name, None, _slice(rows), cover(columns, per_word))
        return fields(words, rule.bits)[:, within(columns, per_word)].contiguous().float().sub_(1 << rule.bits - 1)

    def _scales(self, matrix: int | None) -> Tensor:
        """Return scales [blocks of rows, blocks of columns] float32."""
        scales = self._read(self._weight.scales, matrix)
        if scales.dtype == torch.uint8:
            scales = torch.exp2(scales.float() - _E8M0_BIAS)
        return scales if self._weight.rule.packing == MXFP4 else self._grid(scales.float())

    def _zero_points(self, matrix: int | None) -> Tensor | None:
        """Return zero points, shaped as scales, or None."""
        rule = self._weight.rule
        name = self._weight.zero_points
        if name is None:
            return None
        words = self._read(name, matrix)
        if words.dtype != torch.int32:
            return self._grid(words.float())
        zeros = zero_fields(self._weight, words).float()
        return zeros - (1 << rule.bits - 1) if rule.packing == PACKED else zeros

    def _grid(self, scales: Tensor) -> Tensor:
        return scales.t() if self._weight.rule.packing in (GPTQ, AWQ) else scales.reshape(self._weight.grid)

    def _groups(self, columns: range) -> Tensor:
        """Return the blocks of consecutive parts of the columns, all parts as wide: whole blocks, or single columns."""
        width = self._weight.block[1]
        if self._weight.grid[1] == 1:
            return torch.zeros(1, dtype=torch.long, device=self._device)
        if self._weight.group_index is None and columns.start % width == 0 and columns.stop % width == 0:
            return torch.arange(columns.start // width, columns.stop // width, device=self._device)
        groups = torch.arange(columns.start, columns.stop, device=self._device) // width
        if self._weight.group_index is None:
            return groups
        stored = self._read(self._weight.group_index, None, _slice(columns)).long()
        if bool((stored == -1).all()):  # compressed-tensors: groups are consecutive
            return groups
        if bool(((stored < 0) | (stored >= self._weight.grid[1])).any()):
            raise CheckpointError(
                f"{self._weight.group_index} names groups beyond the {self._weight.grid[1]} of {self._name}; "
                "download the checkpoint again"
            )
        return stored

    def _read(self, name: str, matrix: int | None, *index: slice) -> Tensor:
        part: Tensor
        if matrix is None:
            part = self._parts[name][index or ...]
        else:
            part = self._parts[name][(slice(matrix, matrix + 1), *index)][0]
        return part.to(self._device)


def zero_fields(weight: QuantizedWeight, stored: Tensor) -> Tensor:
    """Return zero points [blocks of rows, blocks of columns] uint8 in the range of stored values, from 0 on."""
    rule = weight.rule
    if stored.dtype != torch.int32:  # signed
        return (stored.reshape(weight.grid).int() + (1 << rule.bits - 1)).to(torch.uint8)
    if rule.packing == PACKED:
        return fields(stored.t(), rule.bits).t()[: weight.grid[0]]
    if rule.zero_point_offset == "word":
        stored = stored + sum(1 << shift for shift in range(0, _WORD, rule.bits))
    zeros = fields(stored, rule.bits)
    if rule.packing == AWQ:
        zeros = in_awq_order(zeros)
    if rule.zero_point_offset == "field":
        zeros = (zeros + 1) & ((1 << rule.bits) - 1)
    return zeros[:, : weight.grid[0]].t()


def global_factor(weight: QuantizedWeight, parts: Mapping[str, Any]) -> Tensor | None:
    """Return the factor of the whole tensor, [1] float32; None without any. compressed-tensors stores its inverse."""
    if weight.global_scale is None:
        return None
    scale: Tensor = parts[weight.global_scale][...].reshape(1)
    return scale.reciprocal() if weight.rule.packing == FP4_PACKED else scale


def check_stored_shape(weight: QuantizedWeight, parts: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the shape that is stored beside a weight is not that of its values."""
    if weight.stored_shape is not None:
        stored = parts[weight.stored_shape][...].tolist()
        if stored != list(weight.shape):
            raise CheckpointError(
                f"{weight.stored_shape} is {stored}, but the values have shape {weight.shape}; "
                "supported are inputs in whole words. Download the checkpoint again or choose another"
            )


def is_padding_bias(name: str, weights: Mapping[str, Any]) -> bool:
    """Whether a tensor is a bias of zeros beside a quantized weight; AutoGPTQ writes them for every module."""
    beside = weights.get(f"{name.removesuffix('.bias')}.weight")
    is_bias = name.endswith(".bias") and name in weights and getattr(beside, "is_quantized", False)
    return is_bias and not weights[name][...].any()


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def cover(part: range, unit: int) -> slice:
    """Return the units that hold a range of values."""
    return slice(part.start // unit, -(-part.stop // unit))


def within(part: range, unit: int) -> slice:
    """Return the range's place in the values of the units that cover it."""
    skipped = part.start % unit
    return slice(skipped, skipped + len(part))


def fields(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [rows, words] to uint8 [rows, words * 32 / bits], the lowest bits first."""
    stored = words.contiguous().view(torch.uint8)
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


def in_awq_order(values: Tensor) -> Tensor:
    """Return columns in order: the fields of each word are its columns 0, 2, 4, 6, 1, 3, 5, 7."""
    return values.view(len(values), -1, 2, 4).transpose(2, 3).flatten(1)


def _fp4(blocks: Tensor) -> Tensor:
    """Return float32 [rows, values] of E2M1 pairs [rows, blocks, bytes], the lower four bits first."""
    values = torch.tensor((*_FP4, *(-value for value in _FP4)), device=blocks.device)
    pairs = torch.cartesian_prod(values, values).flip(1)  # both values of each byte
    return torch.nn.functional.embedding(blocks.int(), pairs).flatten(1)


def _pick(grid: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the entries [rows, columns, 1] of blocks; a single row of blocks is left to broadcasting."""
    if grid.shape[0] > 1:
        grid = grid.index_select(0, rows)
    return grid.index_select(1, columns).unsqueeze(2)
