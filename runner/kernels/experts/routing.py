"""Routers choose the experts of each token, and tokens are put in order of their experts. Nothing waits for the host.

The plain forms are in ``expert_reference.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.batch import Routing

_CHUNK = 2048  # assignments that a program reads at a time
_PARTS = 8  # most parts of the assignments; they are counted and placed side by side
_LEAST_BINS = 32  # least bins of a histogram


@triton.jit
def _choose_kernel(
    logits,  # [tokens, NUM_EXPERTS] float32
    bias,  # [NUM_EXPERTS] float32, read if HAS_BIAS
    weights,  # out [tokens, TOP_K] float32
    experts,  # out [tokens, TOP_K] int32
    scale,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,  # 1 or 2: how many scores of a group add up to its own
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Grid (tokens,). Among equal scores, the expert with the lowest number is chosen."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    expert_mask = expert < NUM_EXPERTS
    logit = tl.load(logits + token * NUM_EXPERTS + expert, mask=expert_mask, other=-float("inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores
    if HAS_BIAS:
        choice = choice + tl.load(bias + expert, mask=expert_mask, other=0.0)
    choice = tl.where(expert_mask, choice, -float("inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
        group_of = expert // SIZE
        group_scores = tl.full([BLOCK], -float("inf"), tl.float32)  # score of each expert's group
        for group in tl.static_range(GROUPS):
            inside = tl.where(group_of == group, choice, -float("inf"))
            best = tl.max(inside, axis=0)
            if BEST_OF_GROUP == 2:
                at = tl.min(tl.where(inside == best, expert, BLOCK), axis=0)
                best += tl.max(tl.where(expert == at, -float("inf"), inside), axis=0)
            group_scores = tl.where(group_of == group, best, group_scores)
        kept = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(group_scores, axis=0)
            first = tl.min(tl.where(group_scores == best, group_of, BLOCK), axis=0)
            kept = kept | (group_of == first)
            group_scores = tl.where(group_of == first, -float("inf"), group_scores)
        choice = tl.where(kept & expert_mask, choice, -float("inf"))
    column = tl.arange(0, BLOCK_TOP_K)
    chosen = tl.zeros([BLOCK_TOP_K], tl.int32)
    weight = tl.zeros([BLOCK_TOP_K], tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.max(choice, axis=0)
        at = tl.min(tl.where(choice == best, expert, BLOCK), axis=0)
        at = tl.minimum(at, NUM_EXPERTS - 1)  # logits that are NaN choose any expert, none that does not exist
        score = tl.sum(tl.where(expert == at, scores, 0.0), axis=0)
        chosen = tl.where(column == index, at, chosen)
        weight = tl.where(column == index, score, weight)
        choice = tl.where(expert == at, -float("inf"), choice)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    inside = column < TOP_K
    tl.store(weights + token * TOP_K + column, weight * scale, mask=inside)
    tl.store(experts + token * TOP_K + column, chosen, mask=inside)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    groups: tuple[int, int],
    scale: float,
    best_of_group: int = 2,
) -> Routing:
    """Return the experts of each token; see ``expert_reference.choose_experts``."""
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    tokens, num_experts = logits.shape
    routing = Routing(
        torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device),
    )
    if tokens:
        block = triton.next_power_of_2(num_experts)
        _choose_kernel[(tokens,)](
            logits,
            logits if bias is None else bias,
            routing.weights,
            routing.experts,
            scale,
            NUM_EXPERTS=num_experts,
            BLOCK=block,
            TOP_K=top_k,
            BLOCK_TOP_K=triton.next_power_of_2(top_k),
            GROUPS=groups[0],
            TOP_GROUPS=groups[1],
            BEST_OF_GROUP=best_of_group,
            SIGMOID=sigmoid,
            HAS_BIAS=bias is not None,
            RENORMALIZE=renormalize,
            num_warps=1 if block <= 256 else 4,
        )
    return routing


class SortedTokens(NamedTuple):
    """Assignments in order of their experts, so that each tile of rows belongs to one expert.

    Assignment a is choice a % top_k of token a // top_k. Tiles without a token have expert -1.
    """

    assignments: Tensor  # [tiles * tile_rows] int32; the number of assignments where a tile has no further row
    experts: Tensor  # [tiles] int32, number on this rank; -1: the tile is empty


@triton.jit
def _count(experts, begin, end, first_expert, num_experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return the assignments from ``begin`` to ``end`` of each expert, [BLOCK] int32."""
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(begin, end, CHUNK):
        index = at + tl.arange(0, CHUNK)
        expert = tl.load(experts + index, mask=index < end, other=-1) - first_expert
        mine = (index < end) & (expert >= 0) & (expert < num_experts)
        counts += tl.histogram(tl.where(mine, expert, 0), BLOCK, mask=mine)
    return counts


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts"])
def _count_kernel(
    experts,
    counts,  # out [parts, BLOCK] int32
    count,
    first_expert,
    num_experts,
    part_size,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (parts,): count the assignments of each expert in a part."""
    begin = tl.program_id(0) * part_size
    end = tl.minimum(begin + part_size, count)
    part_counts = _count(experts, begin, end, first_expert, num_experts, BLOCK, CHUNK)
    tl.store(counts + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), part_counts)


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles"])
def _place_kernel(
    experts,  # [count] int32
    counts,  # [PARTS, BLOCK] int32, read if there are several parts
    assignments,  # out [tiles * TILE_ROWS] int32
    tile_experts,  # out [tiles] int32
    count,
    first_expert,
    num_experts,
    tiles,
    part_size,
    TILE_ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # at least as many as the grid's
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (num_experts + 1, parts): write the tiles of an expert; the last row writes empty tiles."""
    expert = tl.program_id(0)
    part = tl.program_id(1)
    others = tl.arange(0, BLOCK)
    if PARTS == 1:
        totals = _count(experts, 0, count, first_expert, num_experts, BLOCK, CHUNK)
        before = 0
    else:
        parts = tl.arange(0, PARTS)
        table = tl.load(
            counts + parts[:, None] * BLOCK + others[None, :],
            mask=(parts < tl.num_programs(1))[:, None] & (others < num_experts)[None, :],
            other=0,
        )
        totals = tl.sum(table, axis=0)
        earlier = (parts < part)[:, None] & (others == expert)[None, :]
        before = tl.sum(tl.sum(tl.where(earlier, table, 0), axis=1), axis=0)
    first_tile = tl.sum(tl.where(others < expert, (totals + TILE_ROWS - 1) // TILE_ROWS, 0), axis=0)
    mine = tl.sum(tl.where(others == expert, totals, 0), axis=0)
    column = tl.arange(0, CHUNK)
    if expert == num_experts:
        if part == 0:
            for begin in range(first_tile, tiles, CHUNK):
                at = begin + column
                tl.store(tile_experts + at, tl.full([CHUNK], -1, tl.int32), mask=at < tiles)
    else:
        num_tiles = (mine + TILE_ROWS - 1) // TILE_ROWS
        start = first_tile * TILE_ROWS
        if part == 0:
            for begin in range(0, num_tiles, CHUNK):
                at = begin + column
                tl.store(tile_experts + first_tile + at, tl.zeros([CHUNK], tl.int32) + expert, mask=at < num_tiles)
            row = mine + tl.arange(0, TILE_ROWS)
            padding = tl.zeros([TILE_ROWS], tl.int32) + count
            tl.store(assignments + start + row, padding, mask=row < num_tiles * TILE_ROWS)
        start += before
        end = tl.minimum((part + 1) * part_size, count)
        for begin in range(part * part_size, end, CHUNK):
            at = begin + column
            is_mine = (tl.load(experts + at, mask=at < end, other=-1) == first_expert + expert) & (at < end)
            rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
            tl.store(assignments + start + rank - 1, at, mask=is_mine)
            start += tl.max(rank, axis=0)


def sort_by_expert(experts: Tensor, local: range, tile_rows: int) -> SortedTokens:
    """Put assignments of experts [tokens, top_k] int32 in order of the experts in ``local``; leave out all others."""
    count = experts.numel()
    num_experts = len(local)
    tiles = min(count, count // tile_rows + num_experts)
    sorted_tokens = SortedTokens(
        torch.empty(tiles * tile_rows, dtype=torch.int32, device=experts.device),
        torch.empty(tiles, dtype=torch.int32, device=experts.device),
    )
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(count)))
    part_size = triton.cdiv(triton.cdiv(count, _PARTS), chunk) * chunk
    parts = triton.cdiv(count, part_size)
    block = max(_LEAST_BINS, triton.next_power_of_2(num_experts))
    options = {"BLOCK": block, "CHUNK": chunk, "num_warps": max(1, min(8, chunk // 128))}
    counts = torch.empty(parts, block, dtype=torch.int32, device=experts.device)
    if parts > 1:
        _count_kernel[(parts,)](experts, counts, count, local.start, num_experts, part_size, **options)
    _place_kernel[(num_experts + 1, parts)](
        experts,
        counts,
        sorted_tokens.assignments,
        sorted_tokens.experts,
        count,
        local.start,
        num_experts,
        tiles,
        part_size,
        TILE_ROWS=tile_rows,
        PARTS=1 if parts == 1 else _PARTS,
        **options,
    )
    return sorted_tokens
