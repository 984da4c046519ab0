"""Attention of single tokens over the paged cache, each sequence's keys split over several programs."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.attention import AttentionBatch
from runner.kernels.chain import chained, wait_for_predecessor
from runner.kernels.tiles import AttentionTiles

_MAX_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2  # one computes while the other waits for memory


@triton.jit(do_not_specialize=["page_table_stride", "num_splits"])
def _decode_attention_kernel(
    q,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    cache,  # [pages, KV_HEADS, 2 (K, V), PAGE_SIZE, HEAD_DIM], the last two dense
    page_stride,
    head_stride,
    v_stride,  # from K to V
    page_table,  # [rows, …] int32
    page_table_stride,
    query_starts,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    out,  # [tokens, KV_HEADS * GROUP, HEAD_DIM], written here where one split is all
    parts,  # out [rows, KV_HEADS, num_splits, GROUP, HEAD_DIM] float32: each split's own result
    weights,  # out [rows, KV_HEADS, num_splits, GROUP] float32: log2 of the sum of exp that it stands for
    scale,  # of scores, times log2(e)
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens, 0 for none
    BLOCK_GROUP: tl.constexpr,  # GROUP as a product of matrices takes it
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of products
    CHAINED: tl.constexpr,
):
    """Grid (rows, KV_HEADS, num_splits). Sequences with other than one query are passed over."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    token = tl.load(query_starts + row).to(tl.int64)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - WINDOW, 0)
    first_block = first_key // BLOCK_KEYS
    blocks = tl.cdiv(seq_len, BLOCK_KEYS) - first_block
    blocks_of_split = tl.cdiv(blocks, num_splits)
    begin = (first_block + split * blocks_of_split) * BLOCK_KEYS
    end = tl.minimum(begin + blocks_of_split * BLOCK_KEYS, seq_len)

    members = tl.arange(0, BLOCK_GROUP)
    columns = tl.arange(0, HEAD_DIM)
    in_group = (members < GROUP)[:, None]
    heads = (token * KV_HEADS + kv_head) * GROUP + members
    queries = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=in_group, other=0.0).to(DOT)
    keys_of_head = cache + kv_head * head_stride
    pages = page_table + row * page_table_stride

    top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    result = tl.zeros((BLOCK_GROUP, HEAD_DIM), tl.float32)
    for block in range(begin, end, BLOCK_KEYS):
        keys = block + tl.arange(0, BLOCK_KEYS)
        seen = keys < seq_len
        page = tl.load(pages + keys // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        at = keys_of_head + page * page_stride + keys % PAGE_SIZE * HEAD_DIM
        k = tl.load(at[None, :] + columns[:, None], mask=seen[None, :], other=0.0).to(DOT)
        v = tl.load(at[:, None] + v_stride + columns[None, :], mask=seen[:, None], other=0.0).to(DOT)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        if WINDOW > 0:
            seen = seen & (keys >= first_key)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # finite: every block has a key that is seen
        shrunk = tl.exp2(top - new_top)
        shares = tl.exp2(scores - new_top[:, None])
        total = total * shrunk + tl.sum(shares, axis=1)
        result = result * shrunk[:, None] + tl.dot(shares.to(DOT), v, input_precision="ieee")
        top = new_top

    total = tl.maximum(total, 1.0)  # the top score counts as 1; less is only the sum of nothing
    result = result / total[:, None]
    if num_splits == 1:
        at_out = out + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=in_group)
    else:
        part = ((row * KV_HEADS + kv_head) * num_splits + split) * GROUP + members
        tl.store(parts + part[:, None] * HEAD_DIM + columns[None, :], result, mask=in_group)
        tl.store(weights + part, top + tl.log2(total), mask=members < GROUP)  # -inf where nothing was seen


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits_kernel(
    parts,  # [rows, KV_HEADS, num_splits, GROUP, HEAD_DIM] float32
    weights,  # [rows, KV_HEADS, num_splits, GROUP] float32
    query_starts,  # [rows + 1] int32
    out,  # out [tokens, KV_HEADS * GROUP, HEAD_DIM]
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (rows, KV_HEADS * GROUP). Sequences with other than one query are passed over."""
    wait_for_predecessor(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_starts + row).to(tl.int64)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    splits = tl.arange(0, BLOCK_SPLITS)
    columns = tl.arange(0, HEAD_DIM)
    used = splits < num_splits
    at = ((row * KV_HEADS + head // GROUP) * num_splits + splits) * GROUP + head % GROUP
    weight = tl.load(weights + at, mask=used, other=float("-inf"))
    top = tl.max(weight, axis=0)
    share = tl.exp2(weight - tl.where(top > float("-inf"), top, 0.0))
    part = tl.load(parts + at[:, None] * HEAD_DIM + columns[None, :], mask=used[:, None], other=0.0)
    total = tl.maximum(tl.sum(share, axis=0), 1.0)  # the top one has a share of 1
    result = tl.sum(part * share[:, None], axis=0) / total
    at_out = out + (token * KV_HEADS * GROUP + head) * HEAD_DIM + columns
    tl.store(at_out, result.to(out.dtype.element_ty))


class SplitDecode:
    """Attention of the sequences of a batch that have one token each.

    How many programs share a sequence's keys follows from the number of rows alone, so that a captured graph stays
    right, if not always best, for any lengths.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, tiles: AttentionTiles, device: torch.device):
        self._kv_heads, self._group, self._head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self._tiles = tiles
        self._scale = head_dim**-0.5 * math.log2(math.e)
        self._programs = _PROGRAMS_PER_PROCESSOR * tiles.processors
        # Where sequences are split there are at most so many programs, whatever the number of rows.
        parts = self._programs * self._group
        self._parts = torch.empty(parts, head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(parts, dtype=torch.float32, device=device)

    def __call__(self, q: Tensor, cache: Tensor, batch: AttentionBatch, window: int | None, out: Tensor) -> None:
        """Write to ``out`` what queries ``q`` see; both [tokens, num_heads, head_dim], cache a layer's view."""
        rows = batch.device_seq_lens.shape[0]
        num_splits = min(max(self._programs // (rows * self._kv_heads), 1), _MAX_SPLITS)
        _decode_attention_kernel[(rows, self._kv_heads, num_splits)](
            q,
            cache,
            *cache.stride()[:3],
            batch.page_table,
            batch.page_table.stride(0),
            batch.device_query_starts,
            batch.device_seq_lens,
            out,
            self._parts,
            self._weights,
            self._scale,
            num_splits,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            PAGE_SIZE=cache.shape[3],
            WINDOW=window or 0,
            **self._tiles.decode,
            **chained(out),
        )
        if num_splits > 1:
            _combine_splits_kernel[(rows, self._kv_heads * self._group)](
                self._parts,
                self._weights,
                batch.device_query_starts,
                out,
                num_splits,
                KV_HEADS=self._kv_heads,
                GROUP=self._group,
                HEAD_DIM=self._head_dim,
                BLOCK_SPLITS=_MAX_SPLITS,
                num_warps=4,
                **chained(out),
            )
