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
_SPREAD_BLOCK = 128  # assignments that a program spreads


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
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Grid (tokens,). Of equal scores, the expert with the lowest number is chosen."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    known = expert < NUM_EXPERTS
    logit = tl.load(logits + token * NUM_EXPERTS + expert, mask=known, other=-float("inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(logit, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores
    if HAS_BIAS:
        choice = choice + tl.load(bias + expert, mask=known, other=0.0)
    choice = tl.where(known, choice, -float("inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
        group_of = expert // SIZE
        group_scores = tl.full([BLOCK], -float("inf"), tl.float32)  # of each expert's group
        for group in tl.static_range(GROUPS):
            inside = tl.where(group_of == group, choice, -float("inf"))
            best = tl.max(inside, axis=0)
            at = tl.min(tl.where(inside == best, expert, BLOCK), axis=0)
            second = tl.max(tl.where(expert == at, -float("inf"), inside), axis=0)
            group_scores = tl.where(group_of == group, best + second, group_scores)
        kept = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(group_scores, axis=0)
            first = tl.min(tl.where(group_scores == best, group_of, BLOCK), axis=0)
            kept = kept | (group_of == first)
            group_scores = tl.where(group_of == first, -float("inf"), group_scores)
        choice = tl.where(kept & known, choice, -float("inf"))
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
            SIGMOID=sigmoid,
            HAS_BIAS=bias is not None,
            RENORMALIZE=renormalize,
            num_warps=1 if block <= 256 else 4,
        )
    return routing


@triton.jit(do_not_specialize=["count"])
def _spread_kernel(
    experts,  # [tokens, TOP_K] int32
    slots,  # [num_experts, MOST] int32
    counts,  # [num_experts] int32
    load,  # [num_experts] int64, added to
    out,  # [tokens, TOP_K] int32
    count,
    TOP_K: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of assignments,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    expert = tl.load(experts + at, mask=inside, other=0)
    copy = at // TOP_K % tl.load(counts + expert)
    tl.store(out + at, tl.load(slots + expert * MOST + copy), mask=inside)
    tl.atomic_add(load + expert, tl.full([BLOCK], 1, tl.int64), mask=inside)


def spread_over_slots(experts: Tensor, slots: Tensor, counts: Tensor, load: Tensor) -> Tensor:
    """Return a slot of each of the experts; see ``expert_reference.spread_over_slots``."""
    out, count = torch.empty_like(experts), experts.numel()
    if count:
        _spread_kernel[(triton.cdiv(count, _SPREAD_BLOCK),)](
            experts,
            slots,
            counts,
            load,
            out,
            count,
            TOP_K=experts.shape[1],
            MOST=slots.shape[1],
            BLOCK=_SPREAD_BLOCK,
        )
    return out


class SortedTokens(NamedTuple):
    """Assignments in order of their experts, so that each tile of rows belongs to one expert.

    Assignment a is choice a % top_k of token a // top_k. Tiles without a token have expert -1.
    """

    assignments: Tensor  # [tiles * tile_rows] int32; the number of assignments where a tile has no further row
    experts: Tensor  # [tiles] int32, of this rank's experts; -1: the tile is empty


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts"])
def _count_kernel(experts, counts, count, first_expert, num_experts, CHUNK: tl.constexpr):
    """Grid (num_experts,): count the assignments of an expert."""
    mine = first_expert + tl.program_id(0)
    found = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, count, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        found += (tl.load(experts + at, mask=at < count, other=-1) == mine).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["count", "first_expert", "num_experts", "tiles"])
def _place_kernel(
    experts,  # [count] int32
    counts,  # [num_experts] int32
    assignments,  # out [tiles * TILE_ROWS] int32
    tile_experts,  # out [tiles] int32
    count,
    first_expert,
    num_experts,
    tiles,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (num_experts + 1,): write the tiles of an expert; the last program those without any token."""
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK)
    of_others = tl.load(counts + others, mask=others < tl.minimum(expert, num_experts), other=0)
    first_tile = tl.sum((of_others + TILE_ROWS - 1) // TILE_ROWS, axis=0)
    column = tl.arange(0, CHUNK)
    if expert == num_experts:
        for begin in range(first_tile, tiles, CHUNK):
            at = begin + column
            tl.store(tile_experts + at, tl.full([CHUNK], -1, tl.int32), mask=at < tiles)
    else:
        mine = tl.load(counts + expert)
        num_tiles = (mine + TILE_ROWS - 1) // TILE_ROWS
        for begin in range(0, num_tiles, CHUNK):
            at = begin + column
            tl.store(tile_experts + first_tile + at, tl.zeros([CHUNK], tl.int32) + expert, mask=at < num_tiles)
        start = first_tile * TILE_ROWS
        row = mine + tl.arange(0, TILE_ROWS)
        padding = tl.zeros([TILE_ROWS], tl.int32) + count
        tl.store(assignments + start + row, padding, mask=row < num_tiles * TILE_ROWS)
        for begin in range(0, count, CHUNK):
            at = begin + column
            is_mine = tl.load(experts + at, mask=at < count, other=-1) == first_expert + expert
            rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
            tl.store(assignments + start + rank - 1, at, mask=is_mine)
            start += tl.max(rank, axis=0)


def sort_by_expert(experts: Tensor, local: range, tile_rows: int) -> SortedTokens:
    """Put assignments of experts [tokens, top_k] int32 in order of the experts in ``local``; leave out all others."""
    count, num_experts = experts.numel(), len(local)
    tiles = min(count, count // tile_rows + num_experts)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    found = SortedTokens(
        torch.empty(tiles * tile_rows, dtype=torch.int32, device=experts.device),
        torch.empty(tiles, dtype=torch.int32, device=experts.device),
    )
    chunk = min(_CHUNK, max(16, triton.next_power_of_2(count)))
    warps = max(1, min(8, chunk // 128))
    _count_kernel[(num_experts,)](experts, counts, count, local.start, num_experts, CHUNK=chunk, num_warps=warps)
    _place_kernel[(num_experts + 1,)](
        experts,
        counts,
        found.assignments,
        found.experts,
        count,
        local.start,
        num_experts,
        tiles,
        TILE_ROWS=tile_rows,
        BLOCK=triton.next_power_of_2(num_experts),
        CHUNK=chunk,
        num_warps=warps,
    )
    return found
