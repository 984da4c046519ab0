"""Deltas of adapters: y += B (A x) with the A and B of each token's slot, in two launches.

    shrink   a program per tile of tokens, projection and part of the inputs: x Aᵀ, float32
    expand   a program per tile of tokens and block of outputs: the sum over the parts, times B, added to y

A tile has up to 16 tokens of one slot, so each adapter is read once per tile: in a decode step once, in a prompt once
per 16 tokens. Parts of the inputs are summed in a fixed order, so equal steps give equal bits. Programs loop over the
rank of their own adapter: a larger limit costs no time. Unused tiles end at once, so grids depend on sizes alone and
graphs can capture them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import ADAPTER_TILE, AdapterTiles

_INPUTS = 128  # inputs per step of the loop
_PART = 512  # inputs of a program in a step of few tokens, at least
_MOST_PARTS = 8
_FEW_TILES = 64  # up to here, the inputs are divided: more tiles keep the device busy alone
_OUTPUTS = 128  # outputs of a program
_BLOCK_WORDS = 4


class LowRankWeights(NamedTuple):
    """A and B of one linear layer in all slots; see LayerSlots (runner/models/adapters/slots.py)."""

    a: Tensor  # [slots, projections · max_rank · in_features]
    b: Tensor  # [slots, max_rank · outputs]
    ranks: Tensor  # [slots, projections] int32
    blocks: Tensor  # [blocks, 4] int32: projection, first output, first and last + 1 output of the projection
    max_rank: int
    in_features: int


def output_blocks(begins: tuple[int, ...], device: torch.device) -> Tensor:
    """Return blocks of outputs of one projection each. ``begins``: the first output of each, and the end."""
    rows = [
        (member, first, begin, end)
        for member, (begin, end) in enumerate(pairwise(begins))
        for first in range(begin, end, _OUTPUTS)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, _BLOCK_WORDS)


@triton.jit(do_not_specialize=["x_stride", "slot_stride", "rank_stride", "part_stride"])
def _shrink_kernel(
    x,  # [tokens, x_stride]
    x_stride,
    a,  # [slots, slot_stride]: A of each projection [MAX_RANK, IN]
    slot_stride,
    ranks,  # [slots, rank_stride]
    rank_stride,
    tiles,  # [tiles, 3]
    order,
    hidden,  # out [PARTS, tokens, MEMBERS * MAX_RANK] float32
    part_stride,
    IN: tl.constexpr,
    MEMBERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Grid (tiles, MEMBERS, PARTS)."""
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tiles + 3 * tl.program_id(0) + 1)
    count = tl.load(tiles + 3 * tl.program_id(0) + 2)
    member = tl.program_id(1)
    part = tl.program_id(2)
    if count > 0:
        rank = tl.load(ranks + slot * rank_stride + member)
        rows = tl.arange(0, TILE)
        held = rows < count
        token = tl.load(order + first + rows, mask=held, other=0).to(tl.int64)
        columns = tl.arange(0, INPUTS)
        for begin in range(0, rank, RANKS):
            at = begin + tl.arange(0, RANKS)
            total = tl.zeros((TILE, RANKS), dtype=tl.float32)
            for start in range(part * PART, tl.minimum(part * PART + PART, IN), INPUTS):
                inside = start + columns < IN
                values = tl.load(
                    x + token[:, None] * x_stride + (start + columns)[None, :],
                    mask=held[:, None] & inside[None, :],
                    other=0.0,
                )
                weights = tl.load(
                    a + slot * slot_stride + (member * MAX_RANK + at)[None, :] * IN + (start + columns)[:, None],
                    mask=(at < rank)[None, :] & inside[:, None],
                    other=0.0,
                )
                total += tl.dot(values, weights.to(values.dtype), input_precision="ieee")
            target = hidden + part * part_stride + token[:, None] * (MEMBERS * MAX_RANK) + member * MAX_RANK
            tl.store(target + at[None, :], total, mask=held[:, None] & (at < rank)[None, :])


@triton.jit(do_not_specialize=["y_stride", "slot_stride", "rank_stride", "part_stride"])
def _expand_kernel(
    hidden,  # [PARTS, tokens, MEMBERS * MAX_RANK] float32
    part_stride,
    b,  # [slots, slot_stride]: B of each projection, transposed [MAX_RANK, its outputs]
    slot_stride,
    ranks,
    rank_stride,
    tiles,
    order,
    blocks,  # [blocks, 4]
    y,  # in and out [tokens, y_stride]
    y_stride,
    MEMBERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Grid (tiles, blocks)."""
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tiles + 3 * tl.program_id(0) + 1)
    count = tl.load(tiles + 3 * tl.program_id(0) + 2)
    block = blocks + 4 * tl.program_id(1)
    member = tl.load(block)
    if count > 0:
        rank = tl.load(ranks + slot * rank_stride + member)
        if rank > 0:
            output = tl.load(block + 1) + tl.arange(0, OUTPUTS)
            begin_of_member = tl.load(block + 2)
            end_of_member = tl.load(block + 3)
            size = end_of_member - begin_of_member
            inside = output < end_of_member
            rows = tl.arange(0, TILE)
            held = rows < count
            token = tl.load(order + first + rows, mask=held, other=0).to(tl.int64)
            weights = b + slot * slot_stride + begin_of_member * MAX_RANK
            total = tl.zeros((TILE, OUTPUTS), dtype=tl.float32)
            for begin in range(0, rank, RANKS):
                at = begin + tl.arange(0, RANKS)
                source = hidden + token[:, None] * (MEMBERS * MAX_RANK) + (member * MAX_RANK + at)[None, :]
                mask = held[:, None] & (at < rank)[None, :]
                values = tl.zeros((TILE, RANKS), dtype=tl.float32)
                for part in tl.static_range(PARTS):
                    values += tl.load(source + part * part_stride, mask=mask, other=0.0)
                of_rank = tl.load(
                    weights + at[:, None] * size + (output - begin_of_member)[None, :],
                    mask=(at < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                narrow = y.dtype.element_ty
                total += tl.dot(values.to(narrow), of_rank.to(narrow), input_precision="ieee")
            target = y + token[:, None] * y_stride + output[None, :]
            mask = held[:, None] & inside[None, :]
            old = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (old + total).to(y.dtype.element_ty), mask=mask)


def add_delta(weights: LowRankWeights, x: Tensor, y: Tensor, tokens: AdapterTiles) -> None:
    """Add the deltas of tokens with an adapter to y [tokens, outputs] of x [tokens, in_features]."""
    tiles, order, num_tiles = tokens
    x = x if x.stride(1) == 1 else x.contiguous()
    assert y.stride(1) == 1
    in_features = weights.in_features
    max_rank = weights.max_rank
    members = weights.ranks.shape[1]
    parts = min(_MOST_PARTS, triton.cdiv(in_features, _PART)) if num_tiles <= _FEW_TILES else 1
    size = triton.cdiv(triton.cdiv(in_features, parts), _INPUTS) * _INPUTS
    hidden = torch.empty(parts, len(x), members * max_rank, dtype=torch.float32, device=x.device)
    ranks = 16 if max_rank <= 16 else 32 if max_rank <= 32 else 64
    shared = {"MEMBERS": members, "MAX_RANK": max_rank, "PARTS": parts, "TILE": ADAPTER_TILE, "RANKS": ranks}
    _shrink_kernel[(num_tiles, members, parts)](
        x,
        x.stride(0),
        weights.a,
        weights.a.stride(0),
        weights.ranks,
        weights.ranks.stride(0),
        tiles,
        order,
        hidden,
        hidden.stride(0),
        IN=in_features,
        PART=size,
        INPUTS=_INPUTS,
        **shared,
    )
    _expand_kernel[(num_tiles, len(weights.blocks))](
        hidden,
        hidden.stride(0),
        weights.b,
        weights.b.stride(0),
        weights.ranks,
        weights.ranks.stride(0),
        tiles,
        order,
        weights.blocks,
        y,
        y.stride(0),
        OUTPUTS=_OUTPUTS,
        **shared,
    )
