"""Attention of several tokens per sequence over the paged cache, in tiles of queries (arXiv 2307.08691)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kv.layout import UNSCALED, KVScales
from pdserve.model.attention_spec import AttentionSpec
from runner.batch import AttentionBatch
from runner.kernels.attention.sinks import sinks_of_rows
from runner.kernels.tiles import AttentionTiles


@triton.jit
def _row_of_tile(query_starts, tile, rows, BLOCK_QUERIES: tl.constexpr):
    """Return the sequence that a tile belongs to.

    The tiles of sequence r begin at ``query_starts[r] // BLOCK_QUERIES + r``. These suffice for its queries, and need
    no list from the host. Some tiles are empty.
    """
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        is_behind = tl.load(query_starts + middle) // BLOCK_QUERIES + middle <= tile
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    return low - 1


@triton.jit
def _attend(
    queries,  # [BLOCK_ROWS, HEAD_DIM]
    rope_queries,  # [BLOCK_ROWS, ROPE_DIM]; without ROPE_DIM anything
    top,
    total,
    result,
    begin,
    end,
    first_key,  # first key that a query sees, with a window: pages before it may belong to another sequence by now
    positions,  # [BLOCK_ROWS] of the queries
    reach,  # [BLOCK_ROWS]: the last key that each query sees
    keys_of_head,
    page_stride,
    v_stride,
    pages,
    seq_len,
    scale,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the keys from ``begin`` to ``end``. Without MASKED every query must see them all."""
    columns = tl.arange(0, HEAD_DIM)
    if ROPE_DIM > 0:
        rope_columns = tl.arange(0, ROPE_DIM)
    for block in range(begin, end, BLOCK_KEYS):
        keys = block + tl.arange(0, BLOCK_KEYS)
        if MASKED:
            held = keys < seq_len
            if WINDOW > 0:
                held = held & (keys >= first_key)
            page = tl.load(pages + keys // PAGE_SIZE, mask=held, other=0).to(tl.int64)
            at = keys_of_head + page * page_stride + keys % PAGE_SIZE * (HEAD_DIM + ROPE_DIM)
            k = tl.load(at[None, :] + columns[:, None], mask=held[None, :], other=0.0).to(DOT)
            if ROPE_DIM > 0:
                rope_k = tl.load(at[None, :] + HEAD_DIM + rope_columns[:, None], mask=held[None, :], other=0.0).to(DOT)
            else:
                v = tl.load(at[:, None] + v_stride + columns[None, :], mask=held[:, None], other=0.0).to(DOT)
        else:
            page = tl.load(pages + keys // PAGE_SIZE).to(tl.int64)
            at = keys_of_head + page * page_stride + keys % PAGE_SIZE * (HEAD_DIM + ROPE_DIM)
            k = tl.load(at[None, :] + columns[:, None]).to(DOT)
            if ROPE_DIM > 0:
                rope_k = tl.load(at[None, :] + HEAD_DIM + rope_columns[:, None]).to(DOT)
            else:
                v = tl.load(at[:, None] + v_stride + columns[None, :]).to(DOT)
        scores = tl.dot(queries, k, input_precision="ieee")  # not yet scaled: one multiply-add follows
        if ROPE_DIM > 0:
            scores = tl.dot(rope_queries, rope_k, scores, input_precision="ieee")
            v = tl.trans(k)
        if MASKED:
            seen = keys[None, :] <= reach[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        # A query has seen no key yet if its window begins behind this block.
        base = tl.where(new_top > float("-inf"), new_top, 0.0) if MASKED else new_top
        shrunk = tl.exp2(top - base)
        shares = tl.exp2(scores * scale - base[:, None])
        total = total * shrunk + tl.sum(shares, axis=1)
        result = result * shrunk[:, None] + tl.dot(shares.to(DOT), v, input_precision="ieee")
        top = new_top
    return top, total, result


@triton.jit(do_not_specialize=["page_table_stride", "rows"])
def _prefill_attention_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    q_rope,  # [tokens, KV_HEADS * GROUP, ROPE_DIM], read if there is one
    q_rope_token_stride,
    q_rope_head_stride,
    cache,  # [pages, KV_HEADS, 2 (K, V), PAGE_SIZE, HEAD_DIM], or see ROPE_DIM; the last two dense
    page_stride,
    head_stride,
    v_stride,  # from K to V
    page_table,  # [rows, …] int32
    page_table_stride,
    query_starts,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    out,  # out [tokens, KV_HEADS * GROUP, HEAD_DIM]
    sinks,  # [KV_HEADS * GROUP] scores without a value, read if HAS_SINKS
    later,  # [tokens] int32: how many later tokens each token sees, read if HAS_LATER
    scale,  # scale of scores, times log2(e) and the scale of keys in an FP8 cache
    v_scale,  # scale of values in an FP8 cache
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,  # with latents: rows have one plane, HEAD_DIM values and then the rest of the key; else 0
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens, 0 for none
    HAS_SINKS: tl.constexpr,
    HAS_LATER: tl.constexpr,
    FEW: tl.constexpr,  # sequences with at most this many queries are skipped
    BLOCK_GROUP: tl.constexpr,  # GROUP or the next power of two
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of products
):
    """Grid (tiles, KV_HEADS). A tile is BLOCK_QUERIES tokens with all query heads that share keys."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys, so they start first
    kv_head = tl.program_id(1).to(tl.int64)
    row = _row_of_tile(query_starts, tile, rows, BLOCK_QUERIES)
    query_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - query_start
    first = (tile - (query_start // BLOCK_QUERIES + row)) * BLOCK_QUERIES
    if (num_queries <= FEW) | (first >= num_queries):
        return
    seq_len = tl.load(seq_lens + row)
    members = tl.arange(0, BLOCK_QUERIES * BLOCK_GROUP)
    queries_at = first + members // BLOCK_GROUP
    positions = seq_len - num_queries + queries_at
    columns = tl.arange(0, HEAD_DIM)
    mask = ((queries_at < num_queries) & (members % BLOCK_GROUP < GROUP))[:, None]
    heads = ((query_start + queries_at).to(tl.int64) * KV_HEADS + kv_head) * GROUP + members % BLOCK_GROUP
    queries = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0).to(DOT)
    rope_queries = queries
    if ROPE_DIM > 0:
        at_rope = (query_start + queries_at).to(tl.int64) * q_rope_token_stride
        at_rope += (kv_head * GROUP + members % BLOCK_GROUP) * q_rope_head_stride
        rope_columns = tl.arange(0, ROPE_DIM)
        rope_queries = tl.load(q_rope + at_rope[:, None] + rope_columns[None, :], mask=mask, other=0.0).to(DOT)
    keys_of_head = cache + kv_head * head_stride
    pages = page_table + row.to(tl.int64) * page_table_stride

    top = tl.full((BLOCK_QUERIES * BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES * BLOCK_GROUP,), tl.float32)
    if HAS_SINKS:
        top, total = sinks_of_rows(sinks + kv_head * GROUP, members % BLOCK_GROUP, GROUP)
    result = tl.zeros((BLOCK_QUERIES * BLOCK_GROUP, HEAD_DIM), tl.float32)
    first_position = seq_len - num_queries + first
    end = first_position + BLOCK_QUERIES
    reach = positions
    if HAS_LATER:
        reach += tl.load(later + query_start + queries_at, mask=queries_at < num_queries, other=0)
        end = tl.maximum(end, tl.max(reach, axis=0) + 1)
    end = tl.minimum(end, seq_len)
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    else:
        begin = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
        top, total, result = _attend(
            queries, rope_queries, top, total, result, 0, begin, 0, positions, reach, keys_of_head, page_stride,
            v_stride, pages, seq_len, scale, HEAD_DIM, ROPE_DIM, PAGE_SIZE, WINDOW, False, BLOCK_KEYS, DOT,
        )  # fmt: skip
    top, total, result = _attend(
        queries, rope_queries, top, total, result, begin, end, first_position - WINDOW + 1, positions, reach,
        keys_of_head, page_stride, v_stride, pages, seq_len, scale, HEAD_DIM, ROPE_DIM, PAGE_SIZE, WINDOW, True,
        BLOCK_KEYS, DOT,
    )  # fmt: skip
    result = result / tl.maximum(total, 1.0)[:, None]  # the top score counts as 1; less only if no key is stored
    if cache.dtype.element_ty == tl.float8e4nv:
        result = result * v_scale
    tl.store(out + heads[:, None] * HEAD_DIM + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    q: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    tiles: AttentionTiles,
    out: Tensor,
    scales: KVScales = UNSCALED,
    sinks: Tensor | None = None,
    q_rope: Tensor | None = None,
    few: int | None = None,
) -> None:
    """Write the attention output of queries ``q`` to ``out``, for sequences with more than ``few`` tokens.

    ``few`` None: ``tiles.few``.

    Both are [tokens, num_heads, head_dim]; cache is a layer's view [pages, num_kv_heads, 2, page_size, head_dim].
    ``scales`` belong to an FP8 cache, whose keys and values are multiplied as they are stored.
    ``sinks`` [num_heads] are given where the spec has them. With ``q_rope`` [tokens, num_heads, rope_dim] the cache has
    latents [pages, num_kv_heads, 1, page_size, head_dim + rope_dim]: keys are whole rows, values their first part.
    """
    kv_heads = cache.shape[1]
    page_size = cache.shape[3]
    head_dim = q.shape[2]
    rows = batch.device_seq_lens.shape[0]
    options = tiles.prefill_options(spec.window)
    later = batch.later.device if batch.later is not None and spec.whole_images else None
    _prefill_attention_kernel[(q.shape[0] // options["BLOCK_QUERIES"] + rows, kv_heads)](
        q,
        q if q_rope is None else q_rope,
        *((0, 0) if q_rope is None else q_rope.stride()[:2]),
        cache,
        *cache.stride()[:3],
        batch.page_table,
        batch.page_table.stride(0),
        batch.device_query_starts,
        batch.device_seq_lens,
        out,
        q if sinks is None else sinks,
        q if later is None else later,
        spec.scale * math.log2(math.e) * scales.k,
        scales.v,
        rows,
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        HEAD_DIM=head_dim,
        ROPE_DIM=0 if q_rope is None else q_rope.shape[2],
        PAGE_SIZE=page_size,
        WINDOW=spec.window or 0,
        HAS_SINKS=sinks is not None,
        HAS_LATER=later is not None,
        FEW=tiles.few if few is None else few,
        **options,
    )
