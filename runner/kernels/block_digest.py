"""Digests of KV blocks: weighted sums of their words. runner/kv_digest.py defines the weights."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048  # words per iteration
_CHUNKS = 8  # iterations per program


@triton.jit
def _block_digest_kernel(
    words,  # [blocks of the cache, BLOCK_WORDS] integers
    work,  # [blocks, 3 (block, its leading tokens that count, its group)] int64
    multipliers,  # [groups, BLOCK_WORDS] int64
    digests,  # out [blocks] int64, zero before
    BLOCK_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (blocks, parts of a block). Integer sums do not depend on the order of the atomic additions."""
    block = tl.program_id(0)
    source = words + tl.load(work + 3 * block) * BLOCK_WORDS
    limit = tl.load(work + 3 * block + 1)
    multipliers += tl.load(work + 3 * block + 2) * BLOCK_WORDS
    first = tl.program_id(1) * (CHUNK * CHUNKS)
    total = tl.zeros([CHUNK], dtype=tl.int64)
    for chunk in range(CHUNKS):
        at = first + chunk * CHUNK + tl.arange(0, CHUNK)
        token = at // PAGE_WORDS * PAGE_SIZE + at // ROW_WORDS % PAGE_SIZE
        held = (at < BLOCK_WORDS) & (token < limit)
        weights = tl.load(multipliers + at, mask=held, other=0)
        total += tl.load(source + at, mask=held, other=0).to(tl.int64) * weights
    tl.atomic_add(digests + block, tl.sum(total, axis=0), sem="relaxed")


def block_digests(words: Tensor, work: Tensor, multipliers: Tensor, page_size: int, row_words: int) -> Tensor:
    """Return the digests of some blocks. Shape [blocks] int64, modulo 2⁶⁴.

    words [blocks of the cache, words of a block], dense integers of up to 8 bytes; work [blocks, 3] int64, each block
    with the number of its leading tokens that count and its group; multipliers [groups, pages, …, page_size, row_words]
    int64, dense, one per word of a block of each group.
    """
    pages = multipliers.shape[1]
    block_words = multipliers[0].numel()
    assert words.is_contiguous()
    assert work.is_contiguous()
    digests = multipliers.new_zeros(len(work))
    _block_digest_kernel[(len(work), triton.cdiv(block_words, _CHUNK * _CHUNKS))](
        words,
        work,
        multipliers,
        digests,
        BLOCK_WORDS=block_words,
        PAGE_WORDS=block_words // pages,
        PAGE_SIZE=page_size,
        ROW_WORDS=row_words,
        CHUNK=_CHUNK,
        CHUNKS=_CHUNKS,
        num_warps=4,
    )
    return digests
