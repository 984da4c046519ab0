"""Unquantized weights: float32, bfloat16 or float16.

GPUs, and CPUs with 16-bit arithmetic (AVX512-BF16, AMX), compute in the model's own dtype. Other CPUs emulate 16-bit
products at a fifth of the speed of float32. There a model computes in float32, and reading the weights is the cost of a
token. So weights stay 16 bits wide in memory, and FBGEMM's float16 kernel widens them in registers. It reads only
float16. bfloat16 weights fit exactly once they are scaled by a power of two (``_float16_exponents``), so the result is
that of float32 arithmetic on the checkpoint's own numbers.

Measured on two cores of a Sapphire Rapids Xeon (torch 2.13), all products of a 27 M model in ms, by tokens:

                                              1      8     32    128   1,024
    float32, weights 16 bits wide           1.7    3.1    9.7     28     186
    float32, oneDNN's blocked format        4.2    7.1   11.0     27     172
    bfloat16 on AMX, blocked (this CPU's)   1.9    1.9    2.3      4      30

oneDNN compiles a product for each new number of tokens, in 2 to 5 ms, and keeps a thousand of them, at 0.5 MB (few
tokens) to 4 MB (2,048). Steps with prompts rarely repeat a number, so ``padded_tokens`` pads to one of few. Cutting a
step in two takes longer than the padding, because results must be joined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization import LayerOptions, LinearMethod
from runner.placement import TensorPlacement

_PACK_BATCH_HINT = 32  # tokens; oneDNN picks the blocking for it, and accepts any other number
_COMPARED = 1 << 22  # values at a time
_FLOAT16_TOP = 15  # exponent of the largest float16 numbers


def held_dtype(placement: TensorPlacement) -> torch.dtype:
    """Return the dtype that loaded weights have in memory."""
    return placement.stored if placement.stored == placement.dtype or _has_float16_kernel() else placement.dtype


def padded_tokens(num_tokens: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16 …: a power of two, or one and a half of it."""
    unit = 1 << max(0, num_tokens.bit_length() - 2)
    return -(-num_tokens // unit) * unit


class UnquantizedLinearMethod(LinearMethod):
    """On CPUs the weight is packed for oneDNN or FBGEMM; on GPUs one token is multiplied by our own kernel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        self.weight = torch.empty(out_features, in_features, device=placement.device, dtype=placement.stored)
        self.bias = torch.empty(out_features, device=placement.device, dtype=placement.dtype) if bias else None
        self._dtype = placement.dtype
        self._use_triton = placement.use_triton
        self._blocked: Tensor | None = None  # packed for oneDNN
        self._float16: torch.ScriptObject | None = None  # packed for FBGEMM, with the bias
        self._scale: Tensor | None = None  # [out_features], of the output of ``_float16``
        self._rounded: tuple[Tensor, Tensor] | None = None  # places and values that float16 does not hold exactly
        self._gemv: Callable[..., Tensor] | None = None  # for a single token

    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        mine = slice(first_output, first_output + outputs.size)
        dim, start = (0, outputs.start) if inputs.size == inputs.full_size else (1, inputs.start)
        full_shape = outputs.full_size, inputs.full_size
        yield "weight", WeightShard(self.weight[mine], full_shape, dim, start, rows=rows, restore=self.restore_weights)
        if self.bias is not None:
            yield "bias", WeightShard(self.bias[mine], (outputs.full_size,), 0, outputs.start, rows=rows)

    def process_weights_after_loading(self) -> None:
        """Pack the weight. On CPUs the plain weight is dropped."""
        if self.weight.device.type != "cpu":
            self._choose_gemv()
            return
        weight = self.weight.to(self._dtype)
        if self.weight.dtype != self._dtype and _has_float16_kernel():
            self._pack_float16(weight)
        elif _has_onednn(self._dtype):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_BATCH_HINT)
        else:
            self.weight = weight
            return
        self.weight = self.weight.to("meta")

    def restore_weights(self) -> None:
        if self.weight.is_meta:
            self.weight = self.plain_weight().to(self.weight.dtype)
            self._blocked = self._float16 = self._scale = self._rounded = None

    def plain_weight(self) -> Tensor:
        """Return the weight [out_features, in_features], unpacked if it was packed."""
        if self._blocked is not None:
            return self._blocked.to_dense()
        if self._float16 is None:
            return self.weight
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._float16)[0]
        if self._scale is not None:
            weight = weight.mul_(self._scale[:, None])
        if self._rounded is not None:
            places, values = self._rounded
            weight.view(-1)[places] = values
        return weight

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor
        if self._float16 is not None:
            y = torch.ops.quantized.linear_dynamic_fp16(x, self._float16)
            return y if self._scale is None else y.mul_(self._scale)
        if self._blocked is not None:
            return self._apply_onednn(x, self._blocked)
        if self._gemv is not None and x.shape[0] == 1:
            return self._gemv(x, self.weight)
        return F.linear(x, self.weight, self.bias)

    def apply_into(self, x: Tensor, out: Tensor) -> None:
        """Write y to ``out`` [tokens, out_features]. On GPUs, without bias."""
        assert self.bias is None
        if self._gemv is not None and x.shape[0] == 1:
            self._gemv(x, self.weight, out)
        else:
            torch.mm(x, self.weight.t(), out=out)

    def _apply_onednn(self, x: Tensor, blocked: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        padded = padded_tokens(x.shape[0])
        if num_tokens < padded:
            unpadded = x
            x = unpadded.new_zeros(padded, unpadded.shape[1])
            x[:num_tokens] = unpadded
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, self.bias, "none", [], "")
        return y[:num_tokens]

    def _choose_gemv(self) -> None:
        """Import Triton only where it is used."""
        if self._use_triton and self.bias is None and self.weight.dtype != torch.float32:
            from runner.kernels.products import gemv

            self._gemv = gemv.gemv if gemv.fits(self.weight) else None

    def _pack_float16(self, weight: Tensor) -> None:
        """``weight`` is float32, and a copy."""
        bias = self.bias
        if len(_inexact_in_float16(weight)):
            exponents = _float16_exponents(weight)
            weight = weight.ldexp_(exponents[:, None])
            bias = None if bias is None else torch.ldexp(bias, exponents)
            self._scale = torch.ldexp(torch.ones_like(exponents), -exponents)
            places = _inexact_in_float16(weight)
            self._rounded = (places, self.weight.view(-1)[places].float()) if len(places) else None
        self._float16 = torch.ops.quantized.linear_prepack_fp16(weight, bias)


def _has_float16_kernel() -> bool:
    """Whether torch has FBGEMM, which is on x86; newer torch names the quantization engine "x86"."""
    return torch.backends.quantized.engine in ("fbgemm", "x86")


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype on this CPU: 16 bits need AVX-512, or its like."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.float32:
        return True
    ops = torch.ops.mkldnn
    supported: bool = ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
    return supported


def _inexact_in_float16(weight: Tensor) -> Tensor:
    """Return the places of float32 values in the flattened weight that float16 rounds."""
    parts = [torch.empty(0, dtype=torch.long)]
    height = max(1, _COMPARED // max(1, weight.shape[1]))
    for first in range(0, len(weight), height):
        rows = weight[first : first + height]
        differs = rows.to(torch.float16).float() != rows
        parts.append(differs.view(-1).nonzero().view(-1) + first * weight.shape[1])
    return torch.cat(parts)


def _float16_exponents(weight: Tensor) -> Tensor:
    """Return e [out_features] such that each row of weight * 2^e has its largest number at the top of float16.

    Numbers of 8 significant bits (bfloat16) with exponents from -17 to 15 are float16 numbers, the smallest of them
    subnormal. A weight further below its row's largest than these 32 powers of two loses less than 2^-39 of that
    largest, which no float32 sum could show.
    """
    low, high = weight.aminmax(dim=1)
    largest = torch.frexp(torch.maximum(-low, high)).exponent
    return _FLOAT16_TOP - largest.float()
