"""Kernels of latent attention beside the attention itself: store rows of tokens, and gather rows of sequences."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runner.batch import AttentionBatch, LatentNorm, RotaryCosSin

_HEADS = 16  # query heads per program
_ROW_CHUNK = 256


@triton.jit
def _rotate(source, target, mask, cos, sin, HALF: tl.constexpr):
    """Rotate heads whose first half pairs with their second. ``source`` and ``target`` point to the first halves."""
    left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (left * cos - right * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (right * cos + left * sin).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_latents_kernel(
    rows,  # [tokens, RANK + ROPE], token_stride apart
    row_stride,
    q,  # in and out [tokens, HEADS, ROPE]
    q_token_stride,
    q_head_stride,
    cos,  # [tokens, ROPE / 2] float32, rotary_stride apart
    sin,
    rotary_stride,
    slots,  # [tokens] int64
    weight,  # [RANK]
    eps,
    cache,  # out [pages, 1, 1, PAGE_SIZE, RANK + ROPE], the last two dense
    page_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Grid (tokens, 1 + blocks of query heads): the first program stores the row, the others rotate heads."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    cosine = tl.load(cos + token * rotary_stride + column)
    sine = tl.load(sin + token * rotary_stride + column)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            source = rows + token * row_stride
            target = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * (RANK + ROPE)
            at = tl.arange(0, RANK)
            latent = tl.load(source + at).to(tl.float32)
            scale = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
            normed = latent * scale * tl.load(weight + at).to(tl.float32)
            tl.store(target + at, normed.to(cache.dtype.element_ty))
            _rotate(source + RANK + column, target + RANK + column, column < HALF, cosine, sine, HALF)
    else:
        heads = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        at = q + token * q_token_stride + heads[:, None] * q_head_stride + column[None, :]
        _rotate(at, at, (heads < HEADS)[:, None], cosine[None, :], sine[None, :], HALF)


def store_latents(
    rows: Tensor, q: Tensor, rotary: RotaryCosSin, norm: LatentNorm, slots: Tensor, cache: Tensor
) -> None:
    """Norm the latents in ``rows`` and rotate what follows; store the rows in the cache. Rotate q in place.

    rows [tokens, rank + rope], q [tokens, heads, rope], at any stride of tokens and heads; rank and rope are powers of
    two. slots [tokens] int64: page * page_size + offset, -1 to store nothing. cache: a layer's view [pages, 1, 1,
    page_size, rank + rope].
    """
    tokens, heads, rope = q.shape
    rank = len(norm.weight)
    assert rows.stride(1) == q.stride(2) == 1
    assert cache.shape[4] == rank + rope
    assert cache.stride()[3:] == (rank + rope, 1)
    block_heads = min(_HEADS, triton.next_power_of_2(heads))
    _store_latents_kernel[(tokens, 1 + triton.cdiv(heads, block_heads))](
        rows,
        rows.stride(0),
        q,
        *q.stride()[:2],
        rotary.cos,
        rotary.sin,
        rotary.cos.stride(0),
        slots,
        norm.weight,
        norm.eps,
        cache,
        cache.stride(0),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        PAGE_SIZE=cache.shape[3],
        BLOCK_HEADS=block_heads,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["page_table_stride"])
def _gather_latents_kernel(
    cache,  # [pages, 1, 1, PAGE_SIZE, RANK + ROPE], the last two dense
    page_stride,
    seq_lens,  # [rows] int32
    page_table,  # [rows, …] int32
    page_table_stride,
    latents,  # out [tokens, RANK]
    keys,  # out [tokens, HEADS, NOPE + ROPE]: the last ROPE of each head
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # tokens; each sequence begins at a multiple
    BLOCK: tl.constexpr,  # tokens of a program, a part of TILE
    ROW_CHUNK: tl.constexpr,
):
    """Grid (parts of the longest sequence, rows). Every program sums the lengths of the rows before its own."""
    row = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens + row)
    if tl.program_id(0) * BLOCK < (seq_len + TILE - 1) // TILE * TILE:
        start = 0
        for first in range(0, row, ROW_CHUNK):
            others = first + tl.arange(0, ROW_CHUNK)
            lens = tl.load(seq_lens + others, mask=others < row, other=0)
            start += tl.sum((lens + TILE - 1) // TILE * TILE, axis=0)
        held = tokens < seq_len
        page = tl.load(page_table + row.to(tl.int64) * page_table_stride + tokens // PAGE_SIZE, mask=held, other=0)
        at = (cache + page.to(tl.int64) * page_stride + tokens % PAGE_SIZE * (RANK + ROPE))[:, None]
        target = (start + tokens).to(tl.int64)[:, None]
        rank = tl.arange(0, RANK)[None, :]
        rope = tl.arange(0, ROPE)[None, :]
        tl.store(latents + target * RANK + rank, tl.load(at + rank, mask=held[:, None], other=0.0))
        rotated = tl.load(at + RANK + rope, mask=held[:, None], other=0.0)
        for head in range(HEADS):
            tl.store(keys + (target * HEADS + head) * (NOPE + ROPE) + NOPE + rope, rotated)


def gather_latents(
    cache: Tensor, batch: AttentionBatch, longest: int, latents: Tensor, keys: Tensor, tile: int
) -> None:
    """Copy the rows of a batch's sequences out of their pages, one sequence after the other.

    Latents go to ``latents`` [tokens, rank], the rotated parts to the end of each head of ``keys`` [tokens, heads,
    nope + rope]. Each sequence begins at a multiple of ``tile`` tokens, and the rest of its last tile is zero.
    ``longest`` is the longest sequence's length, and cache a layer's view.
    """
    rank = latents.shape[1]
    heads, key_size = keys.shape[1:]
    page_size = cache.shape[3]
    rope = cache.shape[4] - rank
    block = 16
    assert latents.is_contiguous()
    assert keys.is_contiguous()
    assert tile % block == 0
    _gather_latents_kernel[(triton.cdiv(longest, tile) * (tile // block), len(batch.device_seq_lens))](
        cache,
        cache.stride(0),
        batch.device_seq_lens,
        batch.page_table,
        batch.page_table.stride(0),
        latents,
        keys,
        HEADS=heads,
        RANK=rank,
        NOPE=key_size - rope,
        ROPE=rope,
        PAGE_SIZE=page_size,
        TILE=tile,
        BLOCK=block,
        ROW_CHUNK=_ROW_CHUNK,
        num_warps=4,
    )
