"""Attention in plain torch over strided page views: the reference for all back ends, on any device.

A step is cut into two kinds of work. Sequences with one new token are attended together, in groups of similar length,
so that padding at most doubles the work. Longer chunks are attended one sequence at a time, in tiles of queries, so
that neither masks nor wasted work above the diagonal grow with the square of the prompt.

All keys and values are read from the cache, also this step's. So a result does not depend on the chunks of its prompt,
nor on whether a prefix cache or another node computed the tokens before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.batch import AttentionBatch, HeadNorms, RotaryCosSin
from runner.kernels.reference import apply_rotary, dequantize_fp8, expand_cos_sin, quantize_fp8, rms_norm
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement

# Queries attended at once within a chunk, a multiple of _ROWS. On a CPU 64, 128, 256 take 30, 27, 32 ms for 1,024.
_TILE = 128
# Tiles begin and end at multiples of it: torch compiles and keeps a product for each number of queries or keys.
_ROWS = 16


@dataclass(frozen=True)
class _DecodeGroup:
    """Sequences with one query each."""

    rows: Tensor | slice  # their tokens, [group] int64
    pages: Tensor  # [planes (K, V) * group * num_kv_heads * max_pages] int64, rows of KVCache.page_rows
    mask: Tensor  # [group, 1, 1, max_pages * page], 0 or -inf


@dataclass(frozen=True)
class _Tile:
    rows: slice  # tokens
    before: int  # padding queries before the tokens
    after: int  # padding queries after them
    num_keys: int  # gathered keys of the chunk up to the last query
    mask: Tensor  # [1, 1, queries, num_keys], 0 or -inf


@dataclass(frozen=True)
class Chunk:
    """Several consecutive queries of one sequence."""

    pages: Tensor  # [planes * num_kv_heads * num_pages] int64
    tiles: tuple[_Tile, ...]


class _Kind(NamedTuple):
    """Properties of a layer that decide its plan: layers of one kind share it."""

    group: int
    window: int | None
    whole_images: bool


@dataclass(frozen=True)
class _WindowPlan:
    """The work of all layers of a kind."""

    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class _HostBatch:
    """An AttentionBatch as numpy arrays."""

    query_starts: NDArray[np.int64]  # [num_seqs + 1]
    seq_lens: NDArray[np.int64]  # [num_seqs]
    page_table: NDArray[np.int32]  # [num_seqs, max_pages]
    num_tokens: int  # tokens of the device's batch, with padding
    later: NDArray[np.int32] | None  # [num_tokens]: see LaterTokens; None: no token sees later ones


class PagedTorchAttention(AttentionBackend):
    """Supports all of AttentionSpec, any page size and grouped queries, but no CUDA graphs."""

    def __init__(self, config: ModelConfig, cache: KVCache, placement: TensorPlacement) -> None:
        layout = cache.layout
        self._cache = cache
        self._placement = placement
        self._specs = config.attention
        self._heads = config.num_heads
        self._kv_heads = layout.num_kv_heads
        self._head_dim = layout.head_dim
        self._page = layout.kernel_block_size
        self._group = config.num_heads // layout.num_kv_heads
        self._planes = layout.spec.planes
        self._value_dim = layout.head_dim
        self._kv_dtype = cache.tensor.dtype
        head_rows = np.arange(layout.num_kv_heads) * layout.num_layers * self._planes
        self._rows_per_page = cache.rows_per_page  # from one page to the next
        self._head_rows = head_rows  # [num_kv_heads]
        kv_head_rows = np.concatenate([head_rows + plane for plane in range(self._planes)])  # K of all heads, V of all
        self._slot_rows = kv_head_rows * self._page  # [planes * num_kv_heads]
        self._fp8_scales = _Fp8Scales(cache) if cache.is_fp8 else None
        self._norms: dict[int, _FusedNorms] = {}
        self._bands: dict[int | None, _BandMask] = {}
        self._rotary: RotaryCosSin | None = None  # the latest one; all layers of a model have the same
        self._cos_sin: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))  # ``_rotary``, expanded
        self._num_tokens = 0  # tokens of sequences, without padding
        self._stored: Tensor | None = None  # tokens that have a slot, None for all
        self._slots: list[Tensor] = []  # by group: [stored tokens * planes * num_kv_heads] int64
        # Layers with the same pages and the same mask share a plan.
        self._kinds = [
            _Kind(group, spec.window, spec.whole_images)
            for group, spec in zip(cache.groups, config.attention, strict=True)
        ]
        self._plans: dict[_Kind, _WindowPlan] = {}

    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        assert not graph, "plain torch gathers by shapes that differ from step to step"
        query_starts = batch.query_starts.astype(np.int64)
        seq_lens = batch.seq_lens.astype(np.int64)
        lengths = np.diff(query_starts)
        later = None if batch.later is None else batch.later.counts
        hosts = [
            _HostBatch(query_starts, seq_lens, group_batch.page_table.cpu().numpy(), group_batch.slots.shape[0], later)
            for group_batch in batch.by_group
        ]
        self._num_tokens = int(query_starts[-1])
        self._slots = [self._plan_stores(group_batch.slots.cpu().numpy()) for group_batch in batch.by_group]
        self._plans = {
            kind: _WindowPlan(
                decodes=tuple(self._plan_decodes(hosts[kind.group], np.flatnonzero(lengths == 1), kind.window)),
                chunks=tuple(
                    self._plan_chunk(hosts[kind.group], int(row), kind) for row in np.flatnonzero(lengths > 1)
                ),
            )
            for kind in set(self._kinds)
        }

    def prepare_and_store(self, layer: int, qkv: Tensor, rotary: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        qk, v = torch.split(heads, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        if norms is not None:
            fused = self._norms.get(layer)
            if fused is None or fused.source is not norms:
                fused = self._norms[layer] = _FusedNorms(norms, self._heads, self._kv_heads)
            qk = rms_norm(qk, fused.weight, fused.eps)
        if self._rotary is not rotary:
            self._rotary = rotary
            self._cos_sin = expand_cos_sin(rotary, self._placement.dtype)
        q, k = torch.split(apply_rotary(qk, *self._cos_sin), [self._heads, self._kv_heads], dim=1)
        self.store(layer, k, v)
        return q

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._store_heads(layer, torch.cat((k, v), dim=1))

    def _store_heads(self, layer: int, both: Tensor) -> None:
        """Store the rows [tokens, planes * num_kv_heads, head_dim]."""
        if self._stored is not None:
            both = both[self._stored]
        if self._fp8_scales is not None:
            rows = quantize_fp8(both, self._fp8_scales.inverse[layer]).view(torch.uint8)
        else:
            rows = both.to(self._kv_dtype)
        rows = rows.reshape(-1, self._head_dim)
        self._cache.token_rows[layer].index_copy_(0, self._slots[self._kinds[layer].group], rows)

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        plan = self._plans[self._kinds[layer]]
        if len(plan.decodes) == 1 and not plan.chunks and isinstance(plan.decodes[0].rows, slice):
            return self._decode(layer, plan.decodes[0], q, sinks)
        out = q.new_empty(q.shape[0], self._heads * self._value_dim)
        out[self._num_tokens :] = 0
        for group in plan.decodes:
            out[group.rows] = self._decode(layer, group, q[group.rows], sinks)
        for chunk in plan.chunks:
            self._attend_chunk(layer, chunk, q, out, sinks)
        return out

    def _plan_stores(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the rows that the tokens with a slot are stored in; the same tokens have one in all groups."""
        held = slots >= 0
        self._stored = None
        if not held.all():
            self._stored = self._index(np.flatnonzero(held))
            slots = slots[held]
        # A slot counts the tokens of one head; the cache has other heads and layers between two pages.
        rows = slots + slots // self._page * ((self._rows_per_page - 1) * self._page)
        return self._index(rows[:, None] + self._slot_rows)

    # ------------------------------------------------------------ one token per sequence

    def _plan_decodes(self, batch: _HostBatch, rows: NDArray[np.int64], window: int | None) -> Iterator[_DecodeGroup]:
        tokens = batch.query_starts[rows]
        positions = batch.seq_lens[rows] - 1
        first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0) // self._page
        num_pages = positions // self._page - first + 1
        for members in _groups_of_similar_size(num_pages):
            columns = first[members, None] + np.arange(num_pages[members].max())
            # Beyond a sequence's end any page will do: its keys are masked.
            columns_held = np.minimum(columns, positions[members, None] // self._page)
            pages = batch.page_table[rows[members, None], columns_held]
            keys = (columns[:, :, None] * self._page + np.arange(self._page)).reshape(len(members), -1)
            hidden = keys > positions[members, None]
            if window is not None:
                hidden |= keys <= positions[members, None] - window
            mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
            everything = len(members) == batch.num_tokens
            yield _DecodeGroup(
                rows=slice(None) if everything else self._index(tokens[members]),
                pages=self._page_index(pages),
                mask=torch.from_numpy(mask).to(self._placement.device, self._placement.dtype),
            )

    def _decode(self, layer: int, group: _DecodeGroup, q: Tensor, sinks: Tensor | None) -> Tensor:
        size = q.shape[0]
        keys, values = self._gather(layer, group.pages, size)
        grouped = q.view(size, self._kv_heads, self._group, self._head_dim)
        sinks = None if sinks is None else sinks.view(self._kv_heads, self._group, 1)
        return _attention(grouped, keys, values, group.mask, self._specs[layer], sinks).reshape(size, -1)

    # ------------------------------------------------------------ several tokens of one sequence

    def _plan_chunk(self, batch: _HostBatch, row: int, kind: _Kind) -> Chunk:
        window = kind.window
        begin = int(batch.query_starts[row])
        end = int(batch.query_starts[row + 1])
        length = int(batch.seq_lens[row])
        start = length - (end - begin)
        first_page = 0 if window is None else max(start - window + 1, 0) // self._page
        last_page = (length - 1) // self._page
        first_key = first_page * self._page
        gathered_keys = (last_page - first_page + 1) * self._page
        band = self._bands.setdefault(window, _BandMask(window, self._placement))
        later = None if batch.later is None or not kind.whole_images else batch.later
        tiles = []
        for first in range(start // _ROWS * _ROWS, length, _TILE):  # positions
            last = min(first + _TILE, -(-length // _ROWS) * _ROWS)
            rows = slice(begin + max(first, start) - start, begin + min(last, length) - start)
            keys = last - first_key
            num_keys = min(keys, gathered_keys)
            if later is not None and later[rows].any():
                reach = np.arange(first, last)
                reach[max(first, start) - first : min(last, length) - first] += later[rows]
                num_keys = min(max(keys, int(reach.max()) + 1 - first_key), gathered_keys)
                mask = _image_mask(np.arange(first, last), reach, first_key + np.arange(num_keys), window)
                mask = mask.to(self._placement.device, self._placement.dtype)
            else:
                mask = band.view(last - first, keys, num_keys)
            tiles.append(_Tile(rows, max(0, start - first), max(0, last - length), num_keys, mask))
        pages = batch.page_table[row : row + 1, first_page : last_page + 1]
        return Chunk(self._page_index(pages), tuple(tiles))

    def _attend_chunk(self, layer: int, chunk: Chunk, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        keys, values = self._gather(layer, chunk.pages, 1)
        sinks = None if sinks is None else sinks.view(self._kv_heads, self._group).t()[:, :, None, None]
        shape = (self._group, -1, -1, -1)  # the queries of a group become a batch that shares keys and values
        for tile in chunk.tiles:
            rows = q[tile.rows]
            if tile.before or tile.after:
                rows = F.pad(rows, (0, 0, 0, 0, tile.before, tile.after))
            queries = rows.view(-1, self._kv_heads, self._group, self._head_dim).permute(2, 1, 0, 3)
            attended = _attention(
                queries,
                keys[:, :, : tile.num_keys].expand(shape),
                values[:, :, : tile.num_keys].expand(shape),
                tile.mask,
                self._specs[layer],
                sinks,
            )
            attended = attended.permute(2, 1, 0, 3).reshape(-1, out.shape[1])
            out[tile.rows] = attended[tile.before : attended.shape[0] - tile.after]

    # ------------------------------------------------------------ pages

    def _page_index(self, pages: NDArray[np.int32]) -> Tensor:
        """Return the page rows of pages [size, n], in the order [planes, size, num_kv_heads, n]."""
        index = pages.astype(np.int64)[:, None] * self._rows_per_page + self._head_rows[:, None]
        return self._index(np.stack([index + plane for plane in range(self._planes)]))

    def _gather(self, layer: int, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [size, num_kv_heads, tokens, head_dim], in the compute dtype.

        With one plane, values are the first elements of keys.
        """
        gathered = self._cache.page_rows[layer].index_select(0, pages).view(self._kv_dtype)
        both = gathered.view(self._planes, size, self._kv_heads, -1, self._head_dim)
        if self._fp8_scales is not None:
            both = dequantize_fp8(both, self._fp8_scales.planes[layer], self._placement.dtype)
        else:
            both = both.to(self._placement.dtype)
        return both[0], both[-1][..., : self._value_dim]

    def _index(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows.reshape(-1)).to(self._placement.device, non_blocking=True)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Return softmax(soft_cap(scale * q kᵀ) + mask) v for q, k, v [..., tokens, head_dim] and an additive mask.

    ``sinks`` broadcast against [..., queries, 1]: one more score per query, without a value.
    """
    if spec.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)
    scores = (q @ k.transpose(-1, -2)).float() * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return weights.to(v.dtype) @ v


def _image_mask(
    queries: NDArray[np.int64], reach: NDArray[np.int64], keys: NDArray[np.int64], window: int | None
) -> Tensor:
    """Return [1, 1, queries, keys]: 0 where a query sees a key, else -inf. All are positions.

    ``reach`` [queries]: the last key that each query sees.
    """
    hidden = keys > reach[:, None]
    if window is not None:
        hidden |= keys <= queries[:, None] - window
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))[None, None]


class _Fp8Scales:
    """Scales of a cache's layers in the shapes that the two conversions need, float32."""

    def __init__(self, cache: KVCache) -> None:
        heads = cache.layout.num_kv_heads
        device = cache.tensor.device
        inverse = [[1.0 / scales.k] * heads + [1.0 / scales.v] * heads for scales in cache.scales]
        self.inverse = torch.tensor(inverse, device=device)[:, :, None]  # [layers, K heads and V heads, 1]
        planes = torch.tensor([[scales.k, scales.v] for scales in cache.scales], device=device)
        self.planes = planes[:, :, None, None, None, None]  # [layers, 2 (K, V), 1, 1, 1, 1]


class _FusedNorms:
    """Norms of query and key heads as one pass over both."""

    def __init__(self, source: HeadNorms, heads: int, kv_heads: int) -> None:
        self.source = source
        pairs = ((source.q_weight, heads), (source.k_weight, kv_heads))
        self.weight = torch.cat([weight.expand(count, -1) for weight, count in pairs])  # [heads + kv_heads, head_dim]
        self.eps = torch.tensor(source.eps, device=self.weight.device)


class _BandMask:
    """Causal masks (with a window, banded ones) of any chunk, as views of one matrix.

    Whether a query sees a key depends on their distance alone. Row i of the matrix is the mask of the query whose own
    key is column ``width - _TILE + i``. A tile takes the first rows, and the columns that end with its last key.
    """

    def __init__(self, window: int | None, placement: TensorPlacement) -> None:
        self._window = window
        self._placement = placement
        self._matrix = torch.empty(_TILE, 0)

    def view(self, queries: int, keys: int, num_keys: int) -> Tensor:
        """Return [1, 1, queries, num_keys]: 0 where a query sees a key, else -inf.

        The last query's own key is the last of ``keys``; the mask covers the first ``num_keys`` of them.
        """
        if self._matrix.shape[1] < keys + _TILE - queries:
            self._grow(keys + _TILE)
        begin = self._matrix.shape[1] - _TILE + queries - keys
        mask = self._matrix[None, None, :queries, begin : begin + num_keys]
        # CUDA's fused kernels load masks in vectors and fault on a view that begins between two.
        return mask.clone() if mask.is_cuda else mask

    def _grow(self, width: int) -> None:
        width = 1 << (width - 1).bit_length()
        queries = torch.arange(width - _TILE, width, device=self._placement.device)[:, None]
        keys = torch.arange(width, device=self._placement.device)
        hidden = keys > queries
        if self._window is not None:
            hidden |= keys <= queries - self._window
        zeros = torch.zeros(_TILE, width, device=self._placement.device, dtype=self._placement.dtype)
        self._matrix = zeros.masked_fill_(hidden, float("-inf"))


def _groups_of_similar_size(sizes: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield indices in groups in which no size is less than half of the largest."""
    if not len(sizes):
        return
    if sizes.min() * 2 >= sizes.max():
        yield np.arange(len(sizes))
        return
    order = np.argsort(sizes, kind="stable")
    while len(order):
        cut = int(np.searchsorted(sizes[order], (sizes[order[-1]] + 1) // 2))
        yield order[cut:]
        order = order[:cut]
