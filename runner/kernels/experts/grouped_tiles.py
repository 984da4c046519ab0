"""Tiles of rows that belong to one expert: what the kernels of grouped products share.

Assignments are sorted by expert (``routing.sort_by_expert``). Few assignments are not sorted: then each one is a tile,
as most experts have a single token at best.

    program ──► tile, block of outputs ──► the tile's expert ──► its assignments ──► rows of x and y
            tile_of_program            expert_of_tile       assignments_of_tile    held_rows
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.kernels.experts.routing import SortedTokens, sort_by_expert

DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ROWS = 16  # least rows of a tensor core product
_UNSORTED = 4  # assignments are not sorted if there are at least this many experts per assignment


class GroupedRows(NamedTuple):
    """The rows of a step's grouped products. Both products of a layer share them."""

    tokens: SortedTokens | None  # None: each assignment is a tile
    experts: Tensor  # [tokens, top_k] int32
    local: range  # this rank's experts
    tile_rows: int

    @property
    def num_assignments(self) -> int:
        """Including those to experts of other ranks."""
        return self.experts.numel()

    @property
    def tiles(self) -> int:
        return self.num_assignments if self.tokens is None else self.tokens.experts.shape[0]

    @property
    def assignments(self) -> Tensor:
        """For kernels: [tiles * tile_rows] int32, not read unless they are sorted."""
        return self.experts if self.tokens is None else self.tokens.assignments

    @property
    def tile_experts(self) -> Tensor:
        """For kernels: [tiles] int32."""
        return self.experts if self.tokens is None else self.tokens.experts


def group_rows(experts: Tensor, local: range, least: int = _ROWS, most: int = 128) -> GroupedRows:
    """Return the rows of the products of experts [tokens, top_k] int32; ``local`` are this rank's experts.

    Tiles have at least ``least`` and at most ``most`` rows.
    """
    count = experts.numel()
    if count * _UNSORTED <= len(local) or experts.shape[0] == 1:
        return GroupedRows(None, experts, local, least)
    # An expert with more rows than a tile reads its weights twice, so tiles have room for a quarter more than the mean.
    per_expert = -(-5 * count // (4 * len(local)))
    tile_rows = min(max(triton.next_power_of_2(per_expert), least), most)
    return GroupedRows(sort_by_expert(experts, local, tile_rows), experts, local, tile_rows)


@triton.jit
def tile_of_program(tiles, out_blocks, together):
    """Return the tile and the block of outputs of this program, of a grid (tiles * out_blocks,).

    Programs of ``together`` tiles share blocks of weights in the cache.
    """
    program = tl.program_id(0)
    first_tile = program // (together * out_blocks) * together
    height = tl.minimum(tiles - first_tile, together)
    tile = first_tile + program % (together * out_blocks) % height
    out_block = program % (together * out_blocks) // height
    return tile, out_block


@triton.jit
def expert_of_tile(experts, tile, first_expert, num_experts, SORTED: tl.constexpr):
    """Return the number of a tile's expert on this rank, and whether the rank has it."""
    if SORTED:
        expert = tl.load(experts + tile)
        has_expert = expert >= 0
    else:
        expert = tl.load(experts + tile) - first_expert
        has_expert = (expert >= 0) & (expert < num_experts)
    return expert, has_expert


@triton.jit
def assignments_of_tile(assignments, tile, count, SORTED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the assignments [BLOCK_ROWS] of a tile; ``count`` and more are none."""
    row = tl.arange(0, BLOCK_ROWS)
    if SORTED:
        assignment = tl.load(assignments + tile * BLOCK_ROWS + row)
    else:
        assignment = tl.where(row == 0, tile, count)
    return assignment


@triton.jit
def held_rows(assignment, count):
    """Return which rows of a tile have an assignment, and the rows of y, int64."""
    held = assignment < count
    return held, tl.where(held, assignment, 0).to(tl.int64)
