"""The form in which V2 keeps the weights of a linear layer, or of a layer's experts, and the bytes that it takes."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["fp8", "mxfp4", "e2m1", "int4"]

#: Bytes of a scale by its dtype in safetensors.
SCALE_BYTES = {"F8_E4M3": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4}
_BLOCK = 64  # inputs that the layout keeps together
_PIECE = 4  # bytes of scales of a block
_OUTPUT_SCALES = 1e-3  # bytes per weight: a float32 for each output, or fewer


class LayerForm(msgspec.Struct, frozen=True, array_like=True):
    """Equal for all projections that are merged into one product, and for all experts of a layer.

    e2m1    value * scale * output scale            fp8     value * scale
    int4    (value - zero) * scale                  mxfp4   value * 2^exponent, of gpt-oss's experts
    """

    kind: Kind
    rows: int = 1  # outputs that share a scale
    group: int = 0  # inputs that share a scale; 0: all
    scale_dtype: str = "F32"  # its name in safetensors
    has_zeros: bool = False  # a zero per output and group; without, the zero of int4 is 8
    has_output_scales: bool = False  # a float32 factor per output
    has_order: bool = False  # groups are of inputs in another order, which the checkpoint stores

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes with the share of scales and zeros."""
        if self.kind == "fp8":
            return 1 + _OUTPUT_SCALES
        shared = SCALE_BYTES[self.scale_dtype] + self.has_zeros
        if self.kind == "int4" and shared in (2, 3) and self.group >= _BLOCK:
            shared = _PIECE  # a scale of 16 bits shares a piece with its zero
        of_groups = 0.5 + (shared / self.group if self.group else 0.0)
        return of_groups + (_OUTPUT_SCALES if self.is_four_bits else 0.0)

    def fits(self, inputs: int) -> bool:
        """Whether the layout of 4-bit weights takes ``inputs``, as ``form_problem`` of runner/kernels/four_bits says.

        Groups are whole, and a block of 64 inputs has at most 4 bytes of scales.
        """
        group = self.group or inputs
        if inputs % 2 or inputs % group or (group not in (16, 32, inputs) and group % _BLOCK):
            return False
        return group == inputs or _BLOCK // group * SCALE_BYTES[self.scale_dtype] <= _PIECE

    @property
    def is_four_bits(self) -> bool:
        """Whether the kernels of ``runner/kernels/products/four_bits.py`` multiply it."""
        return self.kind in ("e2m1", "int4")
