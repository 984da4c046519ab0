"""Linear layers, and the number format they compute in.

On a GPU, and on CPUs with arithmetic for it (AVX512-BF16, AMX), a model computes in its own dtype. Other CPUs emulate
16-bit products, at a fifth of the speed of float32 ones, so there a model computes in float32, and a token costs what
reading the weights costs: they stay 16 bits wide in memory and are widened in registers, by FBGEMM's float16 kernel.
It reads float16 alone; bfloat16 weights fit exactly once they are scaled by a power of two (``_float16_exponents``), so
the result is that of float32 arithmetic on the checkpoint's own numbers.

Measured on two cores of a Sapphire Rapids Xeon (torch 2.13), all products of a 27 M model in ms, by tokens:

                                              1      8     32    128   1,024
    float32, weights 16 bits wide           1.7    3.1    9.7     28     186
    float32, oneDNN's blocked format        4.2    7.1   11.0     27     172
    bfloat16 on AMX, blocked (this CPU's)   1.9    1.9    2.3      4      30

oneDNN compiles a product for each number of tokens that it meets, in 2 to 5 ms, and keeps a thousand of them, at half a
megabyte (few tokens) to four (2,048) each. Steps with prompts rarely repeat a number, so tokens are padded to one of
few (``padded_tokens``): a node that has run for some minutes compiles and keeps no more. Cutting steps in two instead
takes longer than the padding, since results must be joined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.placement import TensorPlacement

_PACK_BATCH_HINT = 32  # tokens; oneDNN picks the blocking for it, and takes any other number too
_FLOAT16_TOP = 15  # exponent of the largest float16 numbers


def held_dtype(place: TensorPlacement) -> torch.dtype:
    """What the weights of a sealed ``Linear`` take in memory."""
    return place.stored if place.stored == place.dtype or _has_float16_kernel() else place.dtype


def padded_tokens(num_tokens: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16 …: a power of two, or one and a half of it."""
    unit = 1 << max(0, num_tokens.bit_length() - 2)
    return -(-num_tokens // unit) * unit


class Linear:
    """y = x Wᵀ + b for x [tokens, in_features]. Fill ``weight`` and ``bias`` first, then ``seal``, then call."""

    def __init__(self, in_features: int, out_features: int, bias: bool, place: TensorPlacement) -> None:
        self.weight = torch.empty(out_features, in_features, device=place.device, dtype=place.stored)
        self.bias = torch.empty(out_features, device=place.device, dtype=place.dtype) if bias else None
        self._dtype = place.dtype
        self._blocked: Tensor | None = None  # for oneDNN
        self._narrow: torch.ScriptObject | None = None  # for FBGEMM, with the bias
        self._scale: Tensor | None = None  # [out_features], of what ``_narrow`` yields
        self._use_triton = place.use_triton
        self._gemv: Callable[..., Tensor] | None = None  # for a single token

    def seal(self) -> None:
        """Bring the weight into the form it is used in. On CPUs the plain weight is dropped."""
        if self.weight.device.type != "cpu":
            self._choose_gemv()
            return
        weight = self.weight.to(self._dtype)
        if self.weight.dtype != self._dtype and _has_float16_kernel():
            self._pack_narrow(weight)
        elif torch._C._has_mkldnn:
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_BATCH_HINT)
        else:
            self.weight = weight
            return
        self.weight = weight.new_empty(0)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write y to ``out`` [tokens, out_features]. On GPUs, without bias."""
        assert self.bias is None
        if self._gemv is not None and x.shape[0] == 1:
            self._gemv(x, self.weight, out)
        else:
            torch.mm(x, self.weight.t(), out=out)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor
        if self._narrow is not None:
            y = torch.ops.quantized.linear_dynamic_fp16(x, self._narrow)
            return y if self._scale is None else y.mul_(self._scale)
        if self._blocked is not None:
            return self._onednn(x, self._blocked)
        if self._gemv is not None and x.shape[0] == 1:
            return self._gemv(x, self.weight)
        return F.linear(x, self.weight, self.bias)

    def _onednn(self, x: Tensor, blocked: Tensor) -> Tensor:
        num_tokens, padded = x.shape[0], padded_tokens(x.shape[0])
        if num_tokens < padded:
            x, narrow = x.new_zeros(padded, x.shape[1]), x
            x[:num_tokens] = narrow
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, self.bias, "none", [], "")
        return y[:num_tokens]

    def _choose_gemv(self) -> None:
        """Triton is imported only where it is used."""
        if self._use_triton and self.bias is None and self.weight.dtype != torch.float32:
            from runner.kernels import gemv

            self._gemv = gemv.gemv if gemv.fits(self.weight) else None

    def _pack_narrow(self, weight: Tensor) -> None:
        bias = self.bias
        if not torch.equal(weight.to(torch.float16).float(), weight):
            exponents = _float16_exponents(weight)
            weight = torch.ldexp(weight, exponents[:, None])
            bias = None if bias is None else torch.ldexp(bias, exponents)
            self._scale = torch.ldexp(torch.ones_like(exponents), -exponents)
        self._narrow = torch.ops.quantized.linear_prepack_fp16(weight, bias)


def _has_float16_kernel() -> bool:
    """FBGEMM is part of torch on x86; newer names of its engine there are its own and "x86"."""
    return torch.backends.quantized.engine in ("fbgemm", "x86")


def _float16_exponents(weight: Tensor) -> Tensor:
    """e [out_features] such that weight * 2^e fits float16 as well as it can, the largest of each row at the top.

    Numbers of 8 significant bits (bfloat16) with exponents from -17 to 15 are float16 numbers, the smallest of them
    subnormal. What is cut off of a weight that lies further below its row's largest than these 32 powers of two is less
    than 2^-39 of that largest: nothing that a float32 sum could show.
    """
    largest = torch.frexp(weight.abs().amax(1)).exponent
    return _FLOAT16_TOP - largest.float()
