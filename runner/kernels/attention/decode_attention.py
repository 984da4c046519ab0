"""Attention of one token per sequence, or a few, over the paged cache; long sequences are split over programs.

Tensor cores multiply at least 16 rows. If fewer query heads share keys, the other rows take more tokens of the
sequence: the first tokens that a decode node computes after a handoff, drafts, or a short question behind a long text.
If they hold less than four tokens, sequences with a few tokens have a launch of their own, with larger tiles.

A step's sequences may differ in length by orders of magnitude. So that no program computes a long one alone, keys are
cut into *parts* of about the same size, several for each program that the device runs at a time.
``_plan_parts_kernel`` cuts them on the device, once per step and window, so that a captured graph fits any lengths. The
last program of a sequence merges its parts.

    lengths     ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  ▒▒  ▒▒▒         tiles of keys
    parts       0▒▒▒▒ 1▒▒▒▒ 2▒▒▒▒ 3▒▒▒▒ 4▒▒▒▒▒  5▒▒  6▒▒▒
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kv.layout import KVScales
from pdserve.model.model_config import ModelConfig
from runner.batch import AttentionBatch
from runner.kernels.attention.sinks import sinks_of_rows
from runner.kernels.dependent_launch import pdl_options, wait_for_predecessor
from runner.kernels.tiles import AttentionTiles

_PROGRAMS_PER_PROCESSOR = 3  # as shared memory allows
_PARTS_PER_PROGRAM = 4  # with one, all would wait for the longest
_PARTS_PER_SEQUENCE = 8  # on average: each adds to the time of the merge
_MOST_PARTS_PER_SEQUENCE = 64
_LEAST_TILES = 4  # least tiles of a part, if the sequences keep the device busy: a merge takes longer than a few tiles


# Fields of a part, adjacent so that a program loads them at once.
_ROW, _TOKEN, _NUM_TOKENS, _POSITION, _BEGIN, _END, _FIRST_PART, _NUM_PARTS = (
    tl.constexpr(field) for field in range(8)
)
_FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["rows", "capacity", "wanted", "least"])
def _plan_parts_kernel(
    query_starts,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    rows,
    parts,  # out [capacity, _FIELDS] int32; row -1 where there is no part
    capacity,
    wanted,  # most parts beyond one per sequence
    least,  # tiles of a part, at least
    LEAST_TOKENS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,). Sequences with more queries than MOST_TOKENS, or fewer than LEAST_TOKENS, get no part; sequences
    without keys get one.
    """
    wait_for_predecessor(PDL)
    row = tl.arange(0, BLOCK_SEQS)
    row_mask = row < rows
    token = tl.load(query_starts + row, mask=row_mask, other=0)
    num_tokens = tl.load(query_starts + row + 1, mask=row_mask, other=0) - token
    taken = (num_tokens >= LEAST_TOKENS) & (num_tokens <= MOST_TOKENS)
    seq_len = tl.load(seq_lens + row, mask=row_mask, other=0)
    position = seq_len - num_tokens  # position of the first query
    first_key = seq_len * 0
    if WINDOW > 0:
        first_key = tl.maximum(position + 1 - WINDOW, 0)
    first_tile = first_key // BLOCK_KEYS
    tiles = tl.where(taken, tl.maximum(tl.cdiv(seq_len, BLOCK_KEYS) - first_tile, 1), 0)
    size = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), wanted), least)
    num_parts = tl.where(taken, tl.maximum(tl.cdiv(tiles - size // 4, size), 1), 0)  # no part for a small rest
    ends = tl.cumsum(num_parts, axis=0)
    first_part = ends - num_parts
    for index in range(tl.max(num_parts, axis=0)):
        has = index < num_parts
        at = parts + (first_part + index) * _FIELDS
        begin = (first_tile + index * tiles // tl.maximum(num_parts, 1)) * BLOCK_KEYS
        end = (first_tile + (index + 1) * tiles // tl.maximum(num_parts, 1)) * BLOCK_KEYS
        tl.store(at + _ROW, row, mask=has)
        tl.store(at + _TOKEN, token, mask=has)
        tl.store(at + _NUM_TOKENS, num_tokens, mask=has)
        tl.store(at + _POSITION, position, mask=has)
        tl.store(at + _BEGIN, begin, mask=has)
        tl.store(at + _END, tl.minimum(end, seq_len), mask=has)
        tl.store(at + _FIRST_PART, first_part, mask=has)
        tl.store(at + _NUM_PARTS, num_parts, mask=has)
    for begin in range(tl.sum(num_parts, axis=0), capacity, CHUNK):
        unused = begin + tl.arange(0, CHUNK)
        tl.store(parts + unused * _FIELDS + _ROW, -1, mask=unused < capacity)


@triton.jit
def _load_part(results, weights, at, has, columns, HEAD_DIM: tl.constexpr):
    """Return the weights [BLOCK_ROWS] and results [BLOCK_ROWS, HEAD_DIM] at offsets ``at``.

    Loads bypass the multiprocessor's own cache, which may hold a line from before another program wrote it.
    """
    weight = tl.load(weights + at, mask=has, other=float("-inf"), cache_modifier=".cg")
    at_results = results + at[:, None] * HEAD_DIM + columns[None, :]
    return weight, tl.load(at_results, mask=has[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_parts(
    results,  # [parts, KV_HEADS, BLOCK_ROWS, HEAD_DIM] float32
    weights,  # [parts, KV_HEADS, BLOCK_ROWS] float32, log2; -inf where none of a part's keys are seen
    first,  # [BLOCK_ROWS]: offsets of the weights of the sequence's first part
    num_parts,
    top,  # [BLOCK_ROWS], log2: of the sinks, or -inf
    total,  # [BLOCK_ROWS]: 1 of the sinks, or 0
    row_mask,  # [BLOCK_ROWS]
    columns,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Return the mean of a sequence's parts by their weights, ``[BLOCK_ROWS, HEAD_DIM]`` float32."""
    merged = tl.zeros((row_mask.shape[0], HEAD_DIM), tl.float32)
    stride: tl.constexpr = KV_HEADS * BLOCK_ROWS
    counts = tl.where(row_mask, num_parts, 0)
    if BLOCK_ROWS * HEAD_DIM > 8192:  # registers hold one part
        for part in range(num_parts):
            weight, values = _load_part(results, weights, first + part * stride, counts > part, columns, HEAD_DIM)
            new_top = tl.maximum(top, weight)
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
            shrunk = tl.exp2(top - base)
            share = tl.exp2(weight - base)
            total = total * shrunk + share
            merged = merged * shrunk[:, None] + values * share[:, None]
            top = new_top
    else:
        for part in range(0, num_parts, 4):  # the loads of four parts wait for memory at the same time
            at = first + part * stride
            weight0, values0 = _load_part(results, weights, at, counts > part, columns, HEAD_DIM)
            weight1, values1 = _load_part(results, weights, at + stride, counts > part + 1, columns, HEAD_DIM)
            weight2, values2 = _load_part(results, weights, at + 2 * stride, counts > part + 2, columns, HEAD_DIM)
            weight3, values3 = _load_part(results, weights, at + 3 * stride, counts > part + 3, columns, HEAD_DIM)
            new_top = tl.maximum(top, tl.maximum(tl.maximum(weight0, weight1), tl.maximum(weight2, weight3)))
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
            shrunk = tl.exp2(top - base)
            share0 = tl.exp2(weight0 - base)
            share1 = tl.exp2(weight1 - base)
            share2 = tl.exp2(weight2 - base)
            share3 = tl.exp2(weight3 - base)
            total = total * shrunk + (share0 + share1) + (share2 + share3)
            merged = merged * shrunk[:, None] + values0 * share0[:, None] + values1 * share1[:, None]
            merged += values2 * share2[:, None] + values3 * share3[:, None]
            top = new_top
    return merged / tl.where(row_mask, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["page_table_stride"])
def _decode_attention_kernel(
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
    parts,  # [parts, _FIELDS] int32
    out,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    results,  # [parts, KV_HEADS, BLOCK_ROWS, HEAD_DIM] float32: of sequences with several parts, before the merge
    weights,  # [parts, KV_HEADS, BLOCK_ROWS] float32: log2 of the sum of exp that each stands for
    done,  # [rows, KV_HEADS] int32: how many parts are, zero before and after
    sinks,  # [KV_HEADS * GROUP] scores without a value, read if HAS_SINKS
    scale,  # scale of scores, times log2(e) and the scale of keys in an FP8 cache
    v_scale,  # scale of values in an FP8 cache
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,  # with latents: rows have one plane, HEAD_DIM values and then the rest of the key; else 0
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens, 0 for none
    HAS_SINKS: tl.constexpr,
    SEVERAL: tl.constexpr,  # whether sequences may have several tokens
    BLOCK_GROUP: tl.constexpr,  # GROUP or the next power of two
    BLOCK_ROWS: tl.constexpr,  # queries as a product of matrices takes them: tokens, of each the query heads
    BLOCK_KEYS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of products
    PDL: tl.constexpr,
):
    """Grid (KV_HEADS, parts): programs without a part are the last to start."""
    wait_for_predecessor(PDL)
    part = tl.program_id(1)
    mine = parts + part * _FIELDS
    row = tl.load(mine + _ROW).to(tl.int64)
    token = tl.load(mine + _TOKEN).to(tl.int64)
    num_tokens = tl.load(mine + _NUM_TOKENS)
    first_position = tl.load(mine + _POSITION)
    begin = tl.load(mine + _BEGIN)
    end = tl.load(mine + _END)
    first_of_row = tl.load(mine + _FIRST_PART)
    num_parts = tl.load(mine + _NUM_PARTS)
    if row < 0:
        return
    kv_head = tl.program_id(0).to(tl.int64)

    members = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, HEAD_DIM)
    query = members // BLOCK_GROUP
    row_mask = (query < num_tokens) & (members % BLOCK_GROUP < GROUP)
    positions = first_position + query
    heads = ((token + query) * KV_HEADS + kv_head) * GROUP + members % BLOCK_GROUP
    queries = tl.load(q + heads[:, None] * HEAD_DIM + columns[None, :], mask=row_mask[:, None], other=0.0).to(DOT)
    if ROPE_DIM > 0:
        rope_columns = tl.arange(0, ROPE_DIM)
        at_rope = (token + query) * q_rope_token_stride + (kv_head * GROUP + members % BLOCK_GROUP) * q_rope_head_stride
        rope_queries = tl.load(q_rope + at_rope[:, None] + rope_columns[None, :], mask=row_mask[:, None], other=0.0)
        rope_queries = rope_queries.to(DOT)
    keys_of_head = cache + kv_head * head_stride
    pages = page_table + row * page_table_stride

    first_top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    first_total = tl.zeros((BLOCK_ROWS,), tl.float32)
    top = first_top
    total = first_total
    result = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
    if HAS_SINKS:
        first_top, first_total = sinks_of_rows(sinks + kv_head * GROUP, members % BLOCK_GROUP, GROUP)
        alone = num_parts == 1  # several parts have one sink together, in the merge
        top = tl.where(alone, first_top, top)
        total = tl.where(alone, first_total, total)
    for block in range(begin, end, BLOCK_KEYS):
        keys = block + tl.arange(0, BLOCK_KEYS)
        seen = keys < end
        if WINDOW > 0:  # pages behind the window may belong to another sequence by now
            seen = seen & (keys > first_position - WINDOW)
        page = tl.load(pages + keys // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        at = keys_of_head + page * page_stride + keys % PAGE_SIZE * (HEAD_DIM + ROPE_DIM)
        k = tl.load(at[None, :] + columns[:, None], mask=seen[None, :], other=0.0).to(DOT)
        scores = tl.dot(queries, k, input_precision="ieee")
        if ROPE_DIM > 0:
            rope_k = tl.load(at[None, :] + HEAD_DIM + rope_columns[:, None], mask=seen[None, :], other=0.0).to(DOT)
            scores = tl.dot(rope_queries, rope_k, scores, input_precision="ieee")
            v = tl.trans(k)
        else:
            v = tl.load(at[:, None] + v_stride + columns[None, :], mask=seen[:, None], other=0.0).to(DOT)
        scores = scores * scale
        if SEVERAL:
            visible = seen[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        else:
            visible = seen[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = new_top  # finite with one token, which sees a key of every tile
        if SEVERAL:
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        shrunk = tl.exp2(top - base)
        shares = tl.exp2(scores - base[:, None])
        total = total * shrunk + tl.sum(shares, axis=1)
        result = result * shrunk[:, None] + tl.dot(shares.to(DOT), v, input_precision="ieee")
        top = new_top

    total = tl.maximum(total, 1.0)  # the top score counts as 1; less only without keys
    result = result / total[:, None]
    if cache.dtype.element_ty == tl.float8e4nv:
        result = result * v_scale
    at_out = out + heads[:, None] * HEAD_DIM + columns[None, :]
    if num_parts == 1:
        tl.store(at_out, result.to(out.dtype.element_ty), mask=row_mask[:, None])
    else:
        ours = (part * KV_HEADS + kv_head) * BLOCK_ROWS + members
        tl.store(results + ours[:, None] * HEAD_DIM + columns[None, :], result, mask=row_mask[:, None])
        tl.store(weights + ours, top + tl.log2(total), mask=row_mask)
        tl.debug_barrier()  # all threads have written before this part counts as done
        counter = done + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.debug_barrier()
            tl.store(counter, 0)
            first = (first_of_row * KV_HEADS + kv_head) * BLOCK_ROWS + members
            merged = _merge_parts(
                results, weights, first, num_parts, first_top, first_total, row_mask, columns,
                KV_HEADS, HEAD_DIM, BLOCK_ROWS,
            )  # fmt: skip
            tl.store(at_out, merged.to(out.dtype.element_ty), mask=row_mask[:, None])


class _Cut:
    """Cuts sequences whose number of tokens is within limits into parts, which one launch attends."""

    def __init__(
        self, tiles: dict[str, Any], tokens: tuple[int, int], programs: int, max_seqs: int, windows: set[int | None],
        device: torch.device,
    ) -> None:  # fmt: skip
        """``tokens``: the least and the most; ``programs``: how many of one head of keys run at a time."""
        self.tiles = tiles
        self.has_several = tokens[1] > 1
        self._tokens = tokens
        self._programs = programs
        self._max_seqs = max_seqs
        self.most_parts = self.num_parts(max_seqs)
        self.parts = {
            window: torch.zeros(self.most_parts, _FIELDS.value, dtype=torch.int32, device=device) for window in windows
        }

    def num_parts(self, rows: int) -> int:
        """Return the most parts of a step of ``rows`` sequences: each has at most one part that is not full."""
        return rows + self._wanted_parts(rows)

    def __call__(self, batch: AttentionBatch, window: int | None, out: Tensor) -> None:
        rows = batch.device_seq_lens.shape[0]
        assert rows <= self._max_seqs, f"a step of {rows} sequences, made for {self._max_seqs}"
        _plan_parts_kernel[(1,)](
            batch.device_query_starts,
            batch.device_seq_lens,
            rows,
            self.parts[window],
            self.num_parts(rows),
            self._wanted_parts(rows),
            min(rows, _LEAST_TILES),
            LEAST_TOKENS=self._tokens[0],
            MOST_TOKENS=self._tokens[1],
            WINDOW=window or 0,
            BLOCK_KEYS=self.tiles["BLOCK_KEYS"],
            BLOCK_SEQS=triton.next_power_of_2(self._max_seqs),
            CHUNK=128,
            **pdl_options(out),
        )

    def _wanted_parts(self, rows: int) -> int:
        wanted = min(max(self._programs, _PARTS_PER_SEQUENCE * rows), _PARTS_PER_PROGRAM * self._programs)
        return min(wanted, _MOST_PARTS_PER_SEQUENCE * rows)


class SplitDecode:
    """Attention of a batch's sequences with one token or a few; at most ``max_seqs`` of them."""

    def __init__(
        self,
        config: ModelConfig,
        tiles: AttentionTiles,
        max_seqs: int,
        device: torch.device,
        scales: Sequence[KVScales],
    ) -> None:
        """``config`` is the rank's part of the model; ``scales`` has one per layer, 1.0 without an FP8 cache."""
        self._kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._group = config.num_heads // config.num_kv_heads
        self._windows = [spec.window for spec in config.attention]
        # Keys of an FP8 cache are multiplied as they are stored: their scale is a factor of all scores.
        pairs = zip(config.attention, scales, strict=True)
        self._scales = [spec.scale * math.log2(math.e) * of_layer.k for spec, of_layer in pairs]
        self._v_scales = [of_layer.v for of_layer in scales]
        windows = set(self._windows)

        def cut(of: dict[str, Any], least: int, most: int) -> _Cut:
            at_a_time = tiles.processors * (_PROGRAMS_PER_PROCESSOR if of is tiles.decode else 1)
            return _Cut(of, (least, most), max(at_a_time // self._kv_heads, 1), max_seqs, windows, device)

        self._singles = cut(tiles.decode, 1, 1)
        self._all = cut(tiles.several, 1, tiles.few)
        # Single tokens beside a few of other sequences keep their tiles, if these are smaller.
        self._mixed = (
            [self._all] if tiles.several is tiles.decode else [self._singles, cut(tiles.several, 2, tiles.few)]
        )
        self._cuts: dict[int | None, list[_Cut]] = {}  # cuts of the current step, by window
        elements = max(tile_cut.most_parts * tile_cut.tiles["BLOCK_ROWS"] for tile_cut in (self._singles, self._all))
        elements *= self._kv_heads
        self._results = torch.empty(elements * config.head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(elements, dtype=torch.float32, device=device)
        self._done = torch.zeros(max_seqs, self._kv_heads, dtype=torch.int32, device=device)

    def plan(self) -> None:
        """Begin a step."""
        self._cuts.clear()

    def __call__(
        self, layer: int, q: Tensor, cache: Tensor, batch: AttentionBatch, out: Tensor, several: bool,
        sinks: Tensor | None = None, q_rope: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the attention output of queries ``q`` to ``out``; both [tokens, num_heads, head_dim].

        With ``q_rope`` [tokens, num_heads, rope_dim] the cache has latents [pages, num_kv_heads, 1, page_size,
        head_dim + rope_dim]: keys are whole rows, values their first part.

        Covers sequences with one token, and if ``several`` also ones with up to ``AttentionTiles.few``. ``cache`` is
        the layer's view, ``sinks`` [num_heads]. The first layer with a window cuts the sequences for the later ones, or
        the first one of them that a step has.
        """
        window = self._windows[layer]
        if layer == self._windows.index(window) or window not in self._cuts:
            has_singles = bool((np.diff(batch.query_starts) == 1).any())
            self._cuts[window] = [self._singles] if not several else self._mixed if has_singles else [self._all]
            for cut in self._cuts[window]:
                cut(batch, window, out)
        for cut in self._cuts[window]:
            self._attend(layer, q, cache, batch, out, cut, sinks, q_rope)

    def _attend(
        self, layer: int, q: Tensor, cache: Tensor, batch: AttentionBatch, out: Tensor, cut: _Cut,
        sinks: Tensor | None, q_rope: Tensor | None,
    ) -> None:  # fmt: skip
        window = self._windows[layer]
        _decode_attention_kernel[(self._kv_heads, cut.num_parts(batch.device_seq_lens.shape[0]))](
            q,
            q if q_rope is None else q_rope,
            *((0, 0) if q_rope is None else q_rope.stride()[:2]),
            cache,
            *cache.stride()[:3],
            batch.page_table,
            batch.page_table.stride(0),
            cut.parts[window],
            out,
            self._results,
            self._weights,
            self._done,
            q if sinks is None else sinks,
            self._scales[layer],
            self._v_scales[layer],
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            ROPE_DIM=0 if q_rope is None else q_rope.shape[2],
            PAGE_SIZE=cache.shape[3],
            WINDOW=window or 0,
            HAS_SINKS=sinks is not None,
            SEVERAL=cut.has_several,
            **cut.tiles,
            **pdl_options(out),
        )
