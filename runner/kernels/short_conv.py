"""A short convolution as a Triton kernel. ``ConvStep`` in ``runner/attention/recurrent.py`` defines it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runner.batch import ShortConvWeights
from runner.kernels.gated_delta import _biased, _convolve_tile, _load_taps

_CHANNELS = 128  # in a program
_TOKENS = 16  # in a program: with 4 warps a thread has 16 values


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "search"])
def _short_conv_kernel(
    x,  # [num_tokens, CHANNELS], rows x_stride apart
    x_stride,
    weight,  # [WIDTH, CHANNELS]
    bias,  # [CHANNELS], read if HAS_BIAS
    history,  # [slots, CHANNELS, WIDTH - 1], slots history_stride apart
    history_stride,
    slots,  # [num_rows] int32
    query_starts,  # [num_rows + 1] int32
    num_rows,
    num_tokens,
    search,  # steps of a search among the rows
    out,  # out [num_tokens, CHANNELS]
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (blocks of TOKENS tokens, blocks of channels). It leaves the history as it is."""
    first = tl.program_id(1) * BLOCK
    within = tl.arange(0, BLOCK)
    valid = first + within < CHANNELS
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = tokens < num_tokens
    rows = tl.zeros([TOKENS], dtype=tl.int32)  # row of each token
    ends = tl.zeros([TOKENS], dtype=tl.int32) + num_rows
    for _ in range(search):
        middles = (rows + ends) // 2
        befores = tl.load(query_starts + middles) <= tokens
        rows = tl.where(befores, middles, rows)
        ends = tl.where(befores, ends, middles)
    taps = _load_taps(weight + first, within, valid, WIDTH, CHANNELS)
    total = _convolve_tile(
        x + first, x_stride, taps, history + first * (WIDTH - 1), history_stride, tokens,
        tokens - tl.load(query_starts + rows), tl.load(slots + rows), token_mask, within, valid,
        WIDTH, TOKENS, BLOCK,
    )  # fmt: skip
    total = _biased(total, bias + first, within, valid, HAS_BIAS)
    at = tokens.to(tl.int64)[:, None] * CHANNELS + first + within[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=token_mask[:, None] & valid[None, :])


def short_conv(x: Tensor, weights: ShortConvWeights, history: Tensor, slots: Tensor, query_starts: Tensor) -> Tensor:
    """Return the convolution [tokens, channels] of x [tokens, channels] with the history of its rows before it.

    history: a layer's view of ``StateCache.conv``, which ``store_history`` advances; slots [rows] and query_starts
    [rows + 1] int32. The output of tokens without a row is unspecified.
    """
    tokens, channels = x.shape
    rows = len(slots)
    assert x.stride(1) == 1
    assert weights.conv.is_contiguous()
    out = x.new_empty(tokens, channels)
    _short_conv_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))](
        x,
        x.stride(0),
        weights.conv,
        weights.conv if weights.bias is None else weights.bias,
        history,
        history.stride(0),
        slots,
        query_starts,
        rows,
        tokens,
        rows.bit_length(),
        out,
        CHANNELS=channels,
        WIDTH=len(weights.conv),
        BLOCK=_CHANNELS,
        TOKENS=_TOKENS,
        HAS_BIAS=weights.bias is not None,
        num_warps=4,
    )
    return out
