"""Triton kernels that build a step's inputs from the state of sequences, and write its results back.

``do_not_specialize`` is everywhere: otherwise Triton compiles a kernel again when a count is 1 or divisible by 16, in
the middle of serving.
"""

from __future__ import annotations

import triton
import triton.language as tl

WRITE_CHUNK = 1024  # words
TOKEN_CHUNK = 256


@triton.jit
def apply_writes_kernel(state, words, CHUNK: tl.constexpr):
    """Copy words[source : source + length] to state[destination …] per write. Grid (writes, chunks of the longest)."""
    entry = words + 3 * tl.program_id(0)
    destination = tl.load(entry)
    source = tl.load(entry + 1)
    length = tl.load(entry + 2)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = at < length
    tl.store(state + destination + at, tl.load(words + source + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["offsets_at", "count"])
def put_tokens_kernel(state, words, offsets_at, tokens, count, CHUNK: tl.constexpr):
    """Copy tokens[i] to state[words[offsets_at + i]], i < count, unless the offset is -1. Grid (chunks,)."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    offset = tl.load(words + offsets_at + at, mask=at < count, other=-1)
    tl.store(state + offset, tl.load(tokens + at, mask=at < count), mask=offset >= 0)


@triton.jit(
    do_not_specialize=[
        *("num_seqs", "slots_at", "query_starts_at", "token_stride", "block_stride", "mapping_stride", "tokens"),
    ]
)
def build_inputs_kernel(
    words,  # [*] int32: the upload
    slots_at,  # offset in words: the slot of each sequence [num_seqs]
    query_starts_at,  # offset in words: where its tokens begin [num_seqs + 1]
    num_seqs,
    token_ids,  # state: [slots, token_stride]
    blocks,  # state: [slots, block_stride], of each logical block an entry per group
    num_computed,  # state: [slots]
    token_stride,
    block_stride,
    input_ids,  # out [tokens] int32
    positions,  # out [tokens] int64
    slot_mapping,  # out [GROUPS, mapping_stride] int64
    mapping_stride,
    seq_lens,  # out [rows] int32
    query_starts,  # out [rows + 1] int32
    tokens,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (rows + 1,): a program per row, and one for padding tokens. Rows beyond the sequences have no tokens."""
    row = tl.program_id(0)
    num_tokens = tl.load(words + query_starts_at + num_seqs)
    if row == tl.num_programs(0) - 1:
        for begin in range(num_tokens, tokens, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            tl.store(input_ids + at, 0, mask=at < tokens)
            tl.store(positions + at, 0, mask=at < tokens)
            for group in tl.static_range(GROUPS):
                tl.store(slot_mapping + group * mapping_stride + at, -1, mask=at < tokens)
        tl.store(query_starts, 0)
    elif row >= num_seqs:
        tl.store(seq_lens + row, 0)
        tl.store(query_starts + row + 1, num_tokens)
    else:
        slot = tl.load(words + slots_at + row).to(tl.int64)
        begin = tl.load(words + query_starts_at + row)
        end = tl.load(words + query_starts_at + row + 1)
        computed = tl.load(num_computed + slot)
        tl.store(query_starts + row + 1, end)
        tl.store(seq_lens + row, computed + end - begin)
        for chunk in range(0, end - begin, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            mask = at < end - begin
            position = computed + at
            tl.store(input_ids + begin + at, tl.load(token_ids + slot * token_stride + position, mask=mask), mask=mask)
            tl.store(positions + begin + at, position.to(tl.int64), mask=mask)
            for group in tl.static_range(GROUPS):
                entry = position // BLOCK_SIZE * GROUPS + group
                block = tl.load(blocks + slot * block_stride + entry, mask=mask, other=0)
                # Pages of a block are adjacent, so a token's slot does not depend on the page size.
                mapped = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
                tl.store(slot_mapping + group * mapping_stride + begin + at, mapped, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "slots_at", "block_stride", "ahead", "page_stride", "table_stride"])
def build_page_table_kernel(
    words,
    slots_at,
    num_seqs,
    blocks,  # state: [slots, block_stride], of each logical block an entry per group
    block_stride,
    seq_lens,  # [rows] int32
    ahead,  # tokens behind each sequence whose pages the table has, too
    page_table,  # out [groups, rows, page_stride] int32, groups table_stride apart
    page_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Translate logical blocks to kernel pages. Grid (rows, chunks of the longest sequence's pages, groups).

    Pages ``ahead`` that a sequence does not have are undefined.
    """
    row = tl.program_id(0)
    group = tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(2)
    pages = tl.minimum((tl.load(seq_lens + row) + ahead + PAGE_SIZE - 1) // PAGE_SIZE, page_stride)
    begin = tl.program_id(1) * CHUNK
    if (row < num_seqs) & (begin < pages):
        slot = tl.load(words + slots_at + row).to(tl.int64)
        at = begin + tl.arange(0, CHUNK)
        mask = at < pages
        entry = at // PAGES_PER_BLOCK * groups + group
        block = tl.load(blocks + slot * block_stride + entry, mask=mask, other=0)
        page = block * PAGES_PER_BLOCK + at % PAGES_PER_BLOCK
        tl.store(page_table + group * table_stride + row.to(tl.int64) * page_stride + at, page, mask=mask)


@triton.jit(do_not_specialize=["slots_at", "query_starts_at", "draw_of_row_at", "token_stride"])
def take_samples_kernel(
    words,
    slots_at,
    query_starts_at,
    draw_of_row_at,  # offset in words: the draw that continues each sequence, -1 for none, -2: has drafts [num_seqs]
    sampled,  # [draws] int32
    token_ids,  # state: [slots, token_stride]
    num_computed,  # state: [slots]
    num_tokens,  # state: [slots]
    token_stride,
):
    """Count a step's tokens as computed, and append its samples. Grid (num_seqs,).

    The host does that for sequences with drafts, when it knows which samples stay.
    """
    row = tl.program_id(0)
    slot = tl.load(words + slots_at + row).to(tl.int64)
    length = tl.load(words + query_starts_at + row + 1) - tl.load(words + query_starts_at + row)
    draw = tl.load(words + draw_of_row_at + row)
    if draw >= -1:
        tl.store(num_computed + slot, tl.load(num_computed + slot) + length)
    if draw >= 0:
        count = tl.load(num_tokens + slot)
        tl.store(token_ids + slot * token_stride + count, tl.load(sampled + draw))
        tl.store(num_tokens + slot, count + 1)
