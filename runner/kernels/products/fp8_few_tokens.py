"""Products of a few quantized tokens with an FP8 weight (E4M3); their time is the time to read the weight.

The weight is the left operand: Hopper's tensor cores need at least 64 rows of the left operand, but as few as 8 columns
of the right one.
Where a weight has too few tiles of outputs for all processors, several programs share a tile: each sums a part of the
inputs and stores it, and the one that ends last adds the parts, always in the same order.

Measured on an H200 for 32 tokens, µs; a scale per output is beside torch._scaled_mm, blocks of 128 x 128 beside
``fp8_products.block_matmul``:

    outputs x inputs                6144 x 4096   4096 x 4096   28672 x 4096   4096 x 14336
    the bytes at 4.3 TB/s                   5.9           3.9           27.3           13.7
    a scale per output              13.9 →  9.7   13.7 →  8.0    40.1 → 33.1    36.9 → 19.0
    blocks                          17.1 → 11.9   14.4 →  9.0    48.8 → 33.8    44.6 → 21.3
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Quantized
from runner.kernels.device_limits import processors_of, shared_memory_of

_LEAST_TOKENS = 16  # least tokens of a tile
_BLOCK_OUT = 64  # a large weight has twice as many
_MOST_SPLITS = 4
_STAGES = 4


@triton.jit
def _part(
    x,
    x_scales,
    weight,
    scales,
    token,
    out,
    token_mask,
    held,
    first,
    last,
    IN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Return sums over the inputs of steps ``first`` to ``last`` - 1, [outputs, tokens]; scaled if GROUP < IN."""
    GROUPS: tl.constexpr = IN // GROUP
    column = tl.arange(0, BLOCK_IN)
    weight_at = weight + out.to(tl.int64)[:, None] * IN + column[None, :]
    x_at = x + token[None, :] * IN + column[:, None]
    x_scales_at = x_scales + token * GROUPS
    scales_at = scales + out // ROW_BLOCK * GROUPS
    total = tl.zeros((out.shape[0], token.shape[0]), tl.float32)
    if GROUPS > 1:
        x_scale = tl.load(x_scales_at + first, mask=token_mask, other=0.0)
        scale = tl.load(scales_at + first, mask=held, other=0.0)
    for step in range(first, last):
        begin = step * BLOCK_IN
        inside_weight = held[:, None]
        inside_x = token_mask[None, :]
        if IN % BLOCK_IN:
            inside_weight &= (begin + column < IN)[None, :]
            inside_x &= (begin + column < IN)[:, None]
        weights = tl.load(weight_at + begin, mask=inside_weight, other=0.0, eviction_policy="evict_first")
        values = tl.load(x_at + begin, mask=inside_x, other=0.0)
        if GROUPS > 1:
            total += tl.dot(weights, values) * scale[:, None] * x_scale[None, :]
            # The scales of the next group are read while this one is multiplied.
            group = tl.minimum(step + 1, GROUPS - 1)
            x_scale = tl.load(x_scales_at + group, mask=token_mask, other=0.0)
            scale = tl.load(scales_at + group, mask=held, other=0.0)
        else:
            total = tl.dot(weights, values, total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _few_tokens_kernel(
    x,  # [tokens, IN] E4M3
    x_scales,  # [tokens, IN / GROUP] float32
    weight,  # [OUT, IN] E4M3
    scales,  # [OUT / ROW_BLOCK, IN / GROUP] float32
    y,  # out [tokens, OUT]
    parts,  # scratch [SPLITS, BLOCK_TOKENS, OUT] float32, used if SPLITS > 1
    arrived,  # [tiles] int32, 0 before and after; used if SPLITS > 1
    tokens,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # BLOCK_IN, or IN: scales are applied to the sum
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of outputs, SPLITS)."""
    STEPS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN
    tile = tl.program_id(0)
    split = tl.program_id(1)
    out = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    token = tl.arange(0, BLOCK_TOKENS)
    token_mask = token < tokens
    held = out < OUT
    first = STEPS * split // SPLITS
    last = STEPS * (split + 1) // SPLITS
    total = _part(
        x, x_scales, weight, scales, token, out, token_mask, held, first, last, IN, ROW_BLOCK, GROUP, BLOCK_IN
    )
    at = token[None, :] * OUT + out[:, None]
    is_last = True
    if SPLITS > 1:
        kept = token_mask[None, :] & held[:, None]
        tl.store(parts + split * (BLOCK_TOKENS * OUT) + at, total, mask=kept)
        tl.debug_barrier()  # all threads have written before this part counts
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.debug_barrier()
            total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
            for other in tl.static_range(SPLITS):
                stored = parts + other * (BLOCK_TOKENS * OUT) + at
                total += tl.load(stored, mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        if GROUP == IN:
            total *= tl.load(scales + out // ROW_BLOCK, mask=held, other=0.0)[:, None]
            total *= tl.load(x_scales + token, mask=token_mask, other=0.0)[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=token_mask[None, :] & held[:, None])


class FewTokens:
    """The products of one weight, whose scales ``fp8_products`` describes. ``group``: inputs that share a scale."""

    def __init__(self, weight: Tensor, scales: Tensor, row_block: int, group: int) -> None:
        self._weight = weight
        self._scales = scales
        self._row_block = row_block
        self._group = group
        out_features, in_features = weight.shape
        has_groups = group < in_features
        processors = processors_of(weight.device)
        is_large = triton.cdiv(out_features, 2 * _BLOCK_OUT) >= processors
        self._block_out = 2 * _BLOCK_OUT if is_large else _BLOCK_OUT
        self._block_in = group if has_groups else 128 if is_large else 256
        self._tiles = triton.cdiv(out_features, self._block_out)
        wanted = 2 * processors if has_groups else processors  # programs; with groups each waits more often
        steps = triton.cdiv(in_features, self._block_in)
        self._splits = max(1, min(wanted // self._tiles, steps, _MOST_SPLITS))
        self._arrived = torch.zeros(self._tiles, dtype=torch.int32, device=weight.device)
        self._shared_memory = shared_memory_of(weight.device)
        self.most_tokens = 64 if is_large else 128  # most for which these products are faster than others

    def __call__(self, x: Quantized) -> Tensor:
        """Return bfloat16 [tokens, out_features] of at most ``most_tokens``, quantized in the weight's groups."""
        tokens = x.values.shape[0]
        out_features, in_features = self._weight.shape
        block_tokens = max(_LEAST_TOKENS, triton.next_power_of_2(tokens))
        stage_bytes = (self._block_out + block_tokens) * self._block_in
        y = torch.empty(tokens, out_features, dtype=torch.bfloat16, device=self._weight.device)
        parts = y  # not used
        if self._splits > 1:
            parts = torch.empty(self._splits, block_tokens, out_features, dtype=torch.float32, device=y.device)
        _few_tokens_kernel[(self._tiles, self._splits)](
            *x,
            self._weight,
            self._scales,
            y,
            parts,
            self._arrived,
            tokens,
            OUT=out_features,
            IN=in_features,
            ROW_BLOCK=self._row_block,
            GROUP=self._group,
            BLOCK_TOKENS=block_tokens,
            BLOCK_OUT=self._block_out,
            BLOCK_IN=self._block_in,
            SPLITS=self._splits,
            num_warps=4,
            num_stages=max(2, min(_STAGES, self._shared_memory // stage_bytes)),
        )
        return y
