"""4-bit weights in memory: their forms, and what kernels read of them, in the layout of ``words.py``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pdserve.errors import CheckpointError
from runner.kernels.four_bits import words as layout

_ZERO = 8  # where int4 has no zeros
_LARGEST_ZERO = 127  # 128 + zero is exact in bfloat16
_LEAST_TILES = 16  # tiles of a product with split inputs that a narrow weight may have
_SCALE_DTYPES = {
    "e2m1": (torch.float8_e4m3fn, torch.uint8),
    "int4": (torch.float16, torch.bfloat16, torch.float32),
}
_TOGETHER = 1 << 26  # weights of several experts that a GPU packs at a time; a CPU's cache holds those of one


class FourBitForm(NamedTuple):
    """The form of a weight: its codes, its groups of inputs, and the dtype of its scales."""

    kind: Literal["e2m1", "int4"]
    group: int  # inputs that share a scale: 16, 32, a multiple of 64, or all
    has_zeros: bool
    scale_dtype: torch.dtype  # uint8: E8M0

    @property
    def is_e2m1(self) -> bool:
        return self.kind == "e2m1"

    def has_pairs(self, inputs: int) -> bool:
        """Whether a piece has a scale of two bytes and its zero, which are 8 where the form has none.

        With a scale without zeros for each block of inputs, this would take 6 % more memory.
        """
        is_wide = self.group == inputs or self.group >= (layout.BLOCK if self.has_zeros else 2 * layout.BLOCK)
        return not self.is_e2m1 and self.scale_dtype.itemsize == 2 and is_wide


class Stored(NamedTuple):
    """A weight as ``FourBitStack.pack`` takes it."""

    codes: Tensor  # [outputs, inputs / 2] uint8, input 2i in the low four bits and 2i + 1 in the high ones
    scales: Tensor  # [outputs, groups] in the form's dtype
    zeros: Tensor | None  # [outputs, groups] uint8, 0 to 127
    output_scales: Tensor | None  # [outputs] float32; None: 1


class _HiddenCodes(NamedTuple):
    """Codes that are not 0, in groups whose scale is."""

    groups: Tensor  # [count] int64
    codes: Tensor  # [count, group / 2] uint8


def form_problem(inputs: int, form: FourBitForm) -> str:
    """Say why kernels and layout take no weight of a form with ``inputs``; empty if they do."""
    if form.scale_dtype not in _SCALE_DTYPES[form.kind]:
        taken = " or ".join(str(dtype).removeprefix("torch.") for dtype in _SCALE_DTYPES[form.kind])
        return f"scales of {form.kind} are {str(form.scale_dtype).removeprefix('torch.')}; they must be {taken}"
    if form.is_e2m1 and form.has_zeros:
        return "E2M1 has zeros; only int4 may have them"
    if inputs % 2 or inputs % form.group:
        return f"{inputs} inputs are not a multiple of 2 and of their group of {form.group}"
    if form.group not in (16, 32, inputs) and form.group % layout.BLOCK:
        return f"{form.group} inputs share a scale; this must be 16, 32, a multiple of {layout.BLOCK}, or all {inputs}"
    if form.group < inputs and layout.BLOCK // form.group * form.scale_dtype.itemsize > layout.PIECE:
        return (
            f"{form.group} inputs share a scale of {form.scale_dtype.itemsize} bytes; a block of {layout.BLOCK} inputs "
            f"may have {layout.PIECE} bytes of scales"
        )
    return ""


class FourBitStack:
    """Weights [outputs, inputs] of a layer: of its experts on this rank, or one of a linear layer."""

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        form: FourBitForm,
        device: torch.device,
    ) -> None:
        problem = form_problem(inputs, form)
        assert not problem, problem
        self.form = form
        self.outputs = outputs
        self.inputs = inputs
        scale_pieces = (
            self.groups if form.has_pairs(inputs) else layout.pieces_of(self.groups, form.scale_dtype.itemsize)
        )
        zero_pieces = layout.pieces_of(self.groups, 1) if form.has_zeros and not form.has_pairs(inputs) else 0
        shape = experts, layout.blocks_of(inputs), outputs, layout.WORDS
        self.words = torch.zeros(shape, device=device, dtype=torch.int16)
        self.scales = torch.zeros(experts, scale_pieces, outputs, device=device, dtype=torch.int32)
        self.zeros = torch.zeros(experts, zero_pieces, outputs, device=device, dtype=torch.int32)
        self.output_scales = torch.ones(experts, outputs, device=device, dtype=torch.float32)
        #: Programs of each tile that have ended; 0 between products.
        self.arrived = torch.zeros(max(outputs, _LEAST_TILES), device=device, dtype=torch.int32)
        self._has_output_scales = [False] * experts
        self._hidden: list[_HiddenCodes | None] = [None] * experts

    @property
    def groups(self) -> int:
        """Scales of an output."""
        return self.inputs // self.form.group

    @property
    def bytes_read(self) -> int:
        """Bytes in memory of all experts."""
        return sum(part.nbytes for part in (self.words, self.scales, self.zeros, self.output_scales))

    def pack(
        self, expert: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, output_scales: Tensor | None
    ) -> None:
        """Store an expert's weight, given as ``Stored`` describes, on any device. Raises CheckpointError."""
        self._pack(expert, 1, codes, scales, zeros, output_scales)

    def pack_all(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, output_scales: Tensor | None) -> None:
        """Store the weights of all experts, whose outputs follow each other in each tensor. Raises CheckpointError."""
        most = 1 if self.words.device.type == "cpu" else _TOGETHER
        together = max(1, most // max(1, self.outputs * self.inputs))
        for first in range(0, len(self.words), together):
            count = min(together, len(self.words) - first)
            rows = slice(first * self.outputs, (first + count) * self.outputs)
            self._pack(
                first,
                count,
                codes[rows],
                scales[rows],
                None if zeros is None else zeros[rows],
                None if output_scales is None else output_scales[rows],
            )

    def _pack(
        self,
        first: int,
        count: int,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        output_scales: Tensor | None,
    ) -> None:
        """Store ``count`` experts from ``first`` on."""
        outputs = count * self.outputs
        assert codes.shape == (outputs, self.inputs // 2)
        assert scales.shape == (outputs, self.groups)
        assert scales.dtype == self.form.scale_dtype
        assert (zeros is not None) == self.form.has_zeros
        experts = slice(first, first + count)
        shape = count, self.outputs
        device = self.words.device
        scales = scales.to(device)
        if self.form.is_e2m1:
            _check_scales(scales)
        codes = codes.to(device)
        self._hidden[experts] = [None] * count
        if scales.dtype == torch.uint8:
            scales = scales + layout.E8M0_SHIFT
        elif self.form.is_e2m1:
            codes = self._hide_codes(first, count, codes, scales)
            scales = layout.store_e4m3(scales)
        words = layout.pack_codes(codes, self.form.is_e2m1)
        self.words[experts] = words.unflatten(1, shape).transpose(0, 1)
        if zeros is not None:
            assert zeros.shape == scales.shape
            _check_zeros(zeros)
            zeros = zeros.to(device, torch.uint8)
        if self.form.has_pairs(self.inputs):
            pairs = layout.pack_pairs(scales, _ZERO if zeros is None else zeros)
            self.scales[experts] = pairs.unflatten(1, shape).transpose(0, 1)
        else:
            self.scales[experts] = layout.pack_pieces(scales).unflatten(1, shape).transpose(0, 1)
            if zeros is not None:
                self.zeros[experts] = layout.pack_pieces(zeros).unflatten(1, shape).transpose(0, 1)
        self._has_output_scales[experts] = [output_scales is not None] * count
        self.output_scales[experts] = 1.0 if output_scales is None else output_scales.view(shape).to(device)

    def unpack(self, expert: int) -> Stored:
        """Return what ``pack`` has stored."""
        zeros: Tensor | None = None
        if self.form.has_pairs(self.inputs):
            scales, zeros = layout.unpack_pairs(self.scales[expert], self.form.scale_dtype)
        else:
            dtype = torch.uint8 if self.form.is_e2m1 else self.form.scale_dtype
            scales = layout.unpack_pieces(self.scales[expert], self.groups, dtype)
            if self.form.has_zeros:
                zeros = layout.unpack_pieces(self.zeros[expert], self.groups, torch.uint8)
        codes = layout.unpack_codes(self.words[expert], self.inputs, self.form.is_e2m1)
        hidden = self._hidden[expert]
        if hidden is not None:
            codes.view(-1, self.form.group // 2)[hidden.groups] = hidden.codes
        if self.form.scale_dtype == torch.uint8:
            scales = scales - layout.E8M0_SHIFT
        elif self.form.is_e2m1:
            scales = layout.restore_e4m3(scales)
        return Stored(
            codes,
            scales,
            zeros if self.form.has_zeros else None,
            self.output_scales[expert].clone() if self._has_output_scales[expert] else None,
        )

    def _hide_codes(self, first: int, count: int, codes: Tensor, scales: Tensor) -> Tensor:
        """Return codes with zeros where the scale is 0, which stored scales cannot say; keep the others aside.

        ``codes`` and ``scales`` are of ``count`` experts from ``first`` on.
        """
        codes = codes.contiguous()
        rows = codes.view(count, scales.numel() // count, -1)
        hides = (scales.view(torch.uint8) == 0).view(count, -1) & (rows != 0).any(2)
        if not bool(hides.any()):
            return codes
        codes = codes.clone()
        rows = codes.view(rows.shape)
        for index in range(count):
            groups = hides[index].nonzero().flatten()
            if len(groups):
                self._hidden[first + index] = _HiddenCodes(groups, rows[index, groups])
                rows[index, groups] = 0
        return codes

    def dequantized(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return an expert's weight [outputs, inputs] in ``dtype``, rounded once from float32."""
        _, scales, zeros, _ = self.unpack(expert)
        codes = layout.separate_codes(self.words[expert], self.inputs, self.form.is_e2m1)
        values = layout.values_of(codes, self.form.is_e2m1).view(self.outputs, self.groups, self.form.group)
        if zeros is not None:
            values -= zeros[:, :, None]
        elif not self.form.is_e2m1:
            values -= _ZERO
        if scales.dtype == torch.uint8:
            scales = torch.exp2(scales.float() - layout.E8M0_BIAS)
        values *= scales.float()[:, :, None]
        values *= self.output_scales[expert][:, None, None]
        return values.flatten(1).to(dtype)


def _check_scales(scales: Tensor) -> None:
    """Raise CheckpointError for E4M3 and E8M0 scales that the kernels do not take."""
    largest = int(scales.view(torch.uint8).max()) if scales.numel() else 0
    if scales.dtype == torch.uint8 and largest > layout.LARGEST_E8M0:
        raise CheckpointError(
            f"a weight has an MXFP4 scale of 2^{largest - layout.E8M0_BIAS}; 4-bit products take scales up to "
            f"2^{layout.LARGEST_E8M0 - layout.E8M0_BIAS}. Load the model dequantized"
        )
    if scales.dtype != torch.uint8 and largest > layout.LARGEST_E4M3:
        raise CheckpointError(
            "a weight has an NVFP4 scale that is negative or NaN; 4-bit products take E4M3 scales from 0 to 448. "
            "Quantize the model again, or load it dequantized"
        )


def _check_zeros(zeros: Tensor) -> None:
    """Raise CheckpointError for zeros that the kernels do not take."""
    largest = int(zeros.max()) if zeros.numel() else 0
    if largest > _LARGEST_ZERO:
        raise CheckpointError(
            f"a weight has a zero of {largest}; 4-bit products take zeros up to {_LARGEST_ZERO}, and int4 needs 16 at "
            "most. Quantize the model again, or load it dequantized"
        )
