"""Attention of single tokens over the paged cache, long sequences split over several programs.

A step's sequences may differ in length by orders of magnitude. So that no program is left alone with a long one while
the others are done, their keys are cut into *parts* of at most as many tiles, about one per program that the device
runs at a time. ``_plan_parts_kernel`` does that on the device, once per step and window, so that a captured graph fits
any lengths. The program that is done last with a sequence puts its parts together.

    lengths     ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  ▒▒  ▒▒▒         tiles of keys
    parts       0▒▒▒▒ 1▒▒▒▒ 2▒▒▒▒ 3▒▒▒▒ 4▒  5▒▒  6▒▒▒   first_part = [0, 5, 6, 7], row_of_part = [0 0 0 0 0 1 2 -1 …]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.attention import AttentionBatch
from runner.kernels.chain import chained, wait_for_predecessor
from runner.kernels.tiles import AttentionTiles

_PROGRAMS_PER_PROCESSOR = 2  # one computes while the other waits for memory
# Parts that are wanted however many sequences there are already: each costs a program of every layer, needed or not.
_FEWEST_PARTS, _MOST_PARTS = 16, 64


@triton.jit
def _tiles_of(seq_len, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The first tile of keys that the last token sees, and how many from there on."""
    first_key = seq_len * 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - WINDOW, 0)
    first = first_key // BLOCK_KEYS
    return first, tl.cdiv(seq_len, BLOCK_KEYS) - first


@triton.jit(do_not_specialize=["rows", "capacity", "wanted"])
def _plan_parts_kernel(
    query_starts,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    rows,
    first_part,  # out [rows + 1] int32: of each row; the last is how many there are
    row_of_part,  # out [capacity] int32, -1 where there is no part
    tiles_per_part,  # out [1] int32
    capacity,
    wanted,  # parts that the tiles of all sequences would make if each one's last part were full
    WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (1,). Sequences with other than one query get no part, those without keys one."""
    wait_for_predecessor(CHAINED)
    row = tl.arange(0, BLOCK_ROWS)
    known = row < rows
    start = tl.load(query_starts + row, mask=known, other=0)
    single = tl.load(query_starts + row + 1, mask=known, other=0) - start == 1
    _, tiles = _tiles_of(tl.load(seq_lens + row, mask=known, other=0), WINDOW, BLOCK_KEYS)
    tiles = tl.where(single, tl.maximum(tiles, 1), 0)
    largest = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), wanted), 1)
    parts = tl.cdiv(tiles, largest)
    ends = tl.cumsum(parts, axis=0)
    tl.store(tiles_per_part, largest)
    tl.store(first_part, 0)
    tl.store(first_part + 1 + row, ends, mask=known)
    for part in range(tl.max(parts, axis=0)):
        tl.store(row_of_part + ends - parts + part, row, mask=part < parts)
    for begin in range(tl.sum(parts, axis=0), capacity, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        tl.store(row_of_part + at, -1, mask=at < capacity)


@triton.jit(do_not_specialize=["page_table_stride"])
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
    first_part,  # [rows + 1] int32
    row_of_part,  # [parts] int32
    tiles_per_part,  # [1] int32
    out,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    results,  # [parts, KV_HEADS, GROUP, HEAD_DIM] float32: those of sequences with several parts, on their way to out
    weights,  # [parts, KV_HEADS, GROUP] float32: log2 of the sum of exp that each stands for
    done,  # [rows, KV_HEADS] int32: how many parts are, zero before and after
    scale,  # of scores, times log2(e)
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
    """Grid (parts, KV_HEADS)."""
    wait_for_predecessor(CHAINED)
    part = tl.program_id(0)
    row = tl.load(row_of_part + part).to(tl.int64)
    if row < 0:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    token = tl.load(query_starts + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first_of_row = tl.load(first_part + row)
    num_parts = tl.load(first_part + row + 1) - first_of_row
    tiles = tl.load(tiles_per_part)
    first_tile, _ = _tiles_of(seq_len, WINDOW, BLOCK_KEYS)
    begin = (first_tile + (part - first_of_row) * tiles) * BLOCK_KEYS
    end = tl.minimum(begin + tiles * BLOCK_KEYS, seq_len)

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
            seen = seen & (keys >= seq_len - WINDOW)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # finite: every tile has a key that is seen
        shrunk = tl.exp2(top - new_top)
        shares = tl.exp2(scores - new_top[:, None])
        total = total * shrunk + tl.sum(shares, axis=1)
        result = result * shrunk[:, None] + tl.dot(shares.to(DOT), v, input_precision="ieee")
        top = new_top

    total = tl.maximum(total, 1.0)  # the top score counts as 1; less is only the sum of nothing
    result = result / total[:, None]
    at_out = out + heads[:, None] * HEAD_DIM + columns[None, :]
    if num_parts == 1:
        tl.store(at_out, result.to(out.dtype.element_ty), mask=in_group)
    else:
        mine = (part * KV_HEADS + kv_head) * GROUP + members
        tl.store(results + mine[:, None] * HEAD_DIM + columns[None, :], result, mask=in_group)
        tl.store(weights + mine, top + tl.log2(total), mask=members < GROUP)
        tl.debug_barrier()  # all of it is written before this part counts as done
        counter = done + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            tl.store(counter, 0)
            merged = tl.zeros((BLOCK_GROUP, HEAD_DIM), tl.float32)
            sum_of_all = tl.zeros((BLOCK_GROUP,), tl.float32)
            top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
            for other in range(first_of_row, first_of_row + num_parts):
                theirs = (other * KV_HEADS + kv_head) * GROUP + members
                # Not from a processor's own cache, which may hold a line from before it was written.
                weight = tl.load(weights + theirs, mask=members < GROUP, other=0.0, cache_modifier=".cg")
                at_theirs = results + theirs[:, None] * HEAD_DIM + columns[None, :]
                values = tl.load(at_theirs, mask=in_group, other=0.0, cache_modifier=".cg")
                new_top = tl.maximum(top, weight)  # finite: every part has a key that is seen
                shrunk = tl.exp2(top - new_top)
                share = tl.exp2(weight - new_top)
                sum_of_all = sum_of_all * shrunk + share
                merged = merged * shrunk[:, None] + values * share[:, None]
                top = new_top
            tl.store(at_out, (merged / sum_of_all[:, None]).to(out.dtype.element_ty), mask=in_group)


@dataclass(frozen=True)
class _Parts:
    """How the sequences of a step are cut for one sliding window, all int32 on the device."""

    first: Tensor  # [rows + 1]
    rows: Tensor  # [parts]
    tiles: Tensor  # [1]


class SplitDecode:
    """Attention of the sequences of a batch that have one token each, at most ``max_seqs`` of them."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_dim: int,
        windows: tuple[int | None, ...],
        tiles: AttentionTiles,
        max_seqs: int,
        device: torch.device,
    ) -> None:
        """``heads``: of queries, of keys; ``windows``: of each layer."""
        num_heads, self._kv_heads = heads
        self._group, self._head_dim = num_heads // self._kv_heads, head_dim
        self._tiles = tiles
        self._windows = windows
        self._scale = head_dim**-0.5 * math.log2(math.e)
        at_a_time = _PROGRAMS_PER_PROCESSOR * tiles.processors
        self._at_a_time = max(at_a_time // self._kv_heads, 1)  # programs per head of keys
        self._max_seqs = max_seqs
        most = max_seqs + self._wanted_parts(max_seqs)  # every sequence has a part that is not full, the others are

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._parts = {window: _Parts(ints(max_seqs + 1), ints(most), ints(1)) for window in set(windows)}
        self._results = torch.empty(most, num_heads, head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(most, num_heads, dtype=torch.float32, device=device)
        self._done = ints(max_seqs, self._kv_heads)

    def __call__(self, layer: int, q: Tensor, cache: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """Write to ``out`` what queries ``q`` see; both [tokens, num_heads, head_dim], cache the layer's view.

        The first layer with a window cuts the sequences for those that follow.
        """
        window = self._windows[layer]
        parts, rows = self._parts[window], batch.device_seq_lens.shape[0]
        num_parts = rows + self._wanted_parts(rows)
        if layer == self._windows.index(window):
            self._cut(batch, window, num_parts, out)
        _decode_attention_kernel[(num_parts, self._kv_heads)](
            q,
            cache,
            *cache.stride()[:3],
            batch.page_table,
            batch.page_table.stride(0),
            batch.device_query_starts,
            batch.device_seq_lens,
            parts.first,
            parts.rows,
            parts.tiles,
            out,
            self._results,
            self._weights,
            self._done,
            self._scale,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            PAGE_SIZE=cache.shape[3],
            WINDOW=window or 0,
            **self._tiles.decode,
            **chained(out),
        )

    def _wanted_parts(self, rows: int) -> int:
        return min(max(self._at_a_time - rows, _FEWEST_PARTS), _MOST_PARTS)

    def _cut(self, batch: AttentionBatch, window: int | None, num_parts: int, out: Tensor) -> None:
        parts, rows = self._parts[window], batch.device_seq_lens.shape[0]
        assert rows <= self._max_seqs, f"a step of {rows} sequences, made for {self._max_seqs}"
        _plan_parts_kernel[(1,)](
            batch.device_query_starts,
            batch.device_seq_lens,
            rows,
            parts.first,
            parts.rows,
            parts.tiles,
            num_parts,
            self._wanted_parts(rows),
            WINDOW=window or 0,
            BLOCK_KEYS=self._tiles.decode["BLOCK_KEYS"],
            BLOCK_ROWS=triton.next_power_of_2(self._max_seqs),
            CHUNK=128,
            **chained(out),
        )
