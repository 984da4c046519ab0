"""4-bit weights in memory: of a linear layer, and of the experts of a layer.

    kind    group         scales                       format
    e2m1    16            E4M3, factor per output      NVFP4
    e2m1    32            E8M0                         MXFP4
    int4    32 … inputs   float16, bfloat16, float32   AWQ, GPTQ, compressed-tensors; with or without zeros

Formats differ in how they are read; all are packed once, into the layout of ``words.py``. Addresses never change,
because captured graphs read them.

A weight is (value - zero) * scale * output_scale. The kernels multiply with (value - zero) * scale rounded once to the
dtype of activations: exact for E2M1, whose products with E4M3 have six bits. Sums are in float32, and are multiplied by
the factor of the output. Without Triton, and for dtypes that no kernel has, a weight is dequantized for each use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.kernels.four_bits.stack import FourBitForm, FourBitStack, Stored

if TYPE_CHECKING:
    from runner.kernels.experts.grouped_tiles import GroupedRows  # it imports Triton


class FourBitExperts(FourBitStack):
    """The weights [outputs, inputs] of a layer's experts on this rank, with their products by Triton."""

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        form: FourBitForm,
        device: torch.device,
        *,
        use_triton: bool = False,
    ) -> None:
        super().__init__(experts, outputs, inputs, form, device)
        self._use_triton = use_triton

    def rows_of_experts(self, experts: Tensor, local: range) -> GroupedRows:
        """Return the rows of ``product`` of experts [tokens, top_k] int32; ``local`` are this rank's experts."""
        from runner.kernels.four_bits.grouped import rows_of_experts

        return rows_of_experts(experts, local)

    def product(self, x: Tensor, rows: GroupedRows, bias: Tensor | None = None) -> Tensor:
        """Return the product of each assignment, [tokens * top_k, outputs]; undefined for other ranks' experts.

        x is [tokens, inputs], or [tokens * top_k, inputs] with a row per assignment; bias [experts, outputs].
        """
        assert self._use_triton, "without Triton, experts are dequantized"
        from runner.kernels.four_bits.grouped import grouped_product

        return grouped_product(x, self, rows, bias)


class FourBitWeight:
    """The weight [outputs, inputs] of a linear layer."""

    def __init__(
        self, outputs: int, inputs: int, form: FourBitForm, device: torch.device, *, use_triton: bool = False
    ) -> None:
        self.stack = FourBitStack(1, outputs, inputs, form, device)
        self._use_triton = use_triton

    @property
    def form(self) -> FourBitForm:
        return self.stack.form

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, output_scales: Tensor | None) -> None:
        """Store a weight, given as ``Stored`` describes, on any device. Raises CheckpointError."""
        self.stack.pack(0, codes, scales, zeros, output_scales)

    def unpack(self) -> Stored:
        """Return what ``pack`` has stored."""
        return self.stack.unpack(0)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, inputs] in ``dtype``, rounded once from float32."""
        return self.stack.dequantized(0, dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [tokens, outputs] of x [tokens, inputs], in its dtype; bias [outputs]."""
        if not self._use_triton:
            return F.linear(x, self.dequantized(x.dtype), bias)
        from runner.kernels.four_bits.products import product

        return product(x, self.stack, bias)
