"""Attention by FlashInfer for chunks of prompts, and by our Triton kernels for single tokens.

In CUDA graphs FA3 attends chunks, too: it launches one program per processor, and each reads on the device what the
plan gives it. So a replay needs a new plan only. FA2 launches as many programs as its plan has parts: graphs have the
Triton kernel in its place.

The Triton kernels need no plan by the host and are as fast for single tokens. On an H200 with Llama 8B's heads they
read the cache at 3.0 to 3.7 TB/s. With short contexts a step of 32 or 256 sequences took 1.25 or 3.13 ms, with
FlashInfer's tensor-core decode 1.43 or 3.36 (Qwen3 0.6B).

FA3 multiplies keys in pages at 490 TFLOP/s, fetching them row by row, and contiguous keys at 590, by TMA (an H200,
Llama 8B's heads, 2,048 … 8,192 queries; 310 and 420 for eight prompts of 1,024). So the keys of large chunks are first
copied out of their pages, layer by layer, at the speed of memory: copy and attention take 0.83 to 0.9 of the time. For
few queries, or with a sliding window, the copy costs more than it saves.

FlashInfer 0.6.13 has no FA3 kernel for 16-bit queries and FP8 keys (``is_fa3_backend_supported``). So keys of an FP8
cache are dequantized while they are copied, from fewer queries on. Other chunks go to the Triton kernel, which
dequantizes them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.attention_backends import flashinfer_specs
from pdserve.model.model_config import ModelConfig
from runner.attention.flashinfer import FlashInferPrefill, Pages, Rows, Sizes
from runner.attention.paged_triton import PagedTritonAttention
from runner.batch import AttentionBatch
from runner.kernels.attention.pages import PageLists
from runner.kernels.gather import GatheredKeys
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement

_QUERIES_PER_KEY = 1024  # least average for which gathering keys saves time
_QUERIES_PER_FP8_KEY = 128  # an estimate: the alternative is the Triton kernel, not FA3 in pages
_SHARE_FOR_KEYS = 256  # gathered keys take at most this part of the device's memory


@dataclass(frozen=True)
class _Chunks:
    """The sequences of a step from the first one with more than a few tokens; a Triton kernel attends earlier ones.

    A graph passes all sequences and tokens to both kernels.
    """

    has_few: bool
    has_several: bool  # a sequence that Triton attends has several tokens
    tokens: slice
    pages: list[Pages]  # by group; filled if a kernel does not gather


class PagedFlashInferAttention(PagedTritonAttention):
    """Supports grouped queries and sliding windows in bfloat16 and float16. Layers with sinks are left to Triton."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, placement: TensorPlacement, max_num_seqs: int, max_num_keys: int
    ) -> None:
        super().__init__(config, cache, placement, max_num_seqs)
        layout = cache.layout
        device = cache.tensor.device
        self._page = layout.kernel_block_size
        self._lists = [PageLists(max_num_seqs, self._page, device, window) for window in layout.groups.windows]
        head_dim = layout.head_dim
        sizes = Sizes(config.num_heads, layout.num_kv_heads, head_dim, head_dim, self._page, placement.dtype)
        # Kernels of a step run one after the other, so they can share the memory between their two phases.
        workspace = sizes.workspace(device)
        self._is_fp8 = cache.is_fp8
        self._queries_per_key = _QUERIES_PER_FP8_KEY if cache.is_fp8 else _QUERIES_PER_KEY
        specs = flashinfer_specs(config.attention, cache.is_fp8)
        self._kernels = {spec: FlashInferPrefill(sizes, workspace, spec) for spec in specs}
        # All kernels run in graphs or none does: their dtypes are equal.
        self._graph_kernels = [
            kernel for kernel in self._kernels.values() if kernel.runs_in_graphs and not cache.is_fp8
        ]
        gathers = any(kernel.gains_by_gathering for kernel in self._kernels.values())
        room = torch.cuda.get_device_properties(device).total_memory // _SHARE_FOR_KEYS
        bytes_per_key = 2 * layout.num_kv_heads * layout.head_dim * placement.dtype.itemsize  # K and V of one layer
        capacity = min(max_num_keys, room // bytes_per_key) if gathers else 0
        self._gathered = GatheredKeys(capacity, layout.num_kv_heads, layout.head_dim, placement.dtype, device)
        self._chunks: _Chunks | None = None

    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        super()._plan(batch, graph)
        self._chunks = None
        if not graph:
            self._plan_chunks(batch)
        elif self.replans(graph):
            self._plan_graph(batch)

    def replans(self, graph: int) -> bool:
        return graph > self._tiles.few and len(self._graph_kernels) > 0

    def _plan_graph(self, batch: AttentionBatch) -> None:
        """Plan for as many rows and tokens as the device's tensors have. Rows before the first chunk count as empty.

        During a capture nothing is copied: the plan of the same size that was made before it is valid.
        """
        rows = batch.device_seq_lens.shape[0]
        tokens = batch.slots.shape[0]
        if not torch.cuda.is_current_stream_capturing():
            longer = np.flatnonzero(np.diff(batch.query_starts) > self._tiles.few)
            begin = batch.query_starts[longer[0] if len(longer) else -1]
            host = Rows(
                query_starts=_padded(np.maximum(batch.query_starts, begin), rows + 1),
                page_starts=_padded(self._page_starts(batch), rows + 1),
                key_starts=None,
                seq_lens=_padded(batch.seq_lens, rows),
                num_tokens=tokens,
            )
            for kernel in self._graph_kernels:
                kernel.plan(host, gather=False, graph=True)
            self._list_pages(batch)
        self._chunks = _Chunks(
            has_few=True,
            has_several=True,
            tokens=slice(0, tokens),
            pages=self._pages(batch.device_query_starts, slice(0, rows)),
        )

    def _plan_chunks(self, batch: AttentionBatch) -> None:
        lengths = np.diff(batch.query_starts)
        longer = np.flatnonzero(lengths > self._tiles.few)
        if not len(longer) or not self._kernels:
            return
        first = int(longer[0])
        rows = len(lengths)
        begin = int(batch.query_starts[first])
        end = int(batch.query_starts[-1])
        page_starts = self._page_starts(batch)
        seq_lens = batch.seq_lens[first:]
        key_starts = self._gathered.plan(batch, first)
        pays = int(key_starts[-1]) <= self._gathered.capacity and self._pays(lengths[first:], seq_lens)
        if self._is_fp8 and not pays:
            return
        host = Rows(
            query_starts=torch.from_numpy(batch.query_starts[first:] - begin),
            page_starts=torch.from_numpy(page_starts[first:]),
            key_starts=torch.from_numpy(key_starts),
            seq_lens=torch.from_numpy(seq_lens),
            num_tokens=end - begin,
        )
        for kernel in self._kernels.values():
            kernel.plan(host, gather=pays and kernel.gains_by_gathering)
        if not all(kernel.gathers for kernel in self._kernels.values()):
            self._list_pages(batch)
        self._chunks = _Chunks(
            has_few=first > 0,
            has_several=bool((lengths[:first] > 1).any()),
            tokens=slice(begin, end),
            pages=self._pages(batch.device_query_starts[first:] - begin, slice(first, rows)),
        )

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        chunks = self._chunks
        kernel = self._kernels.get(self._specs[layer])
        if chunks is None or kernel is None:
            return super().attend(layer, q, sinks)
        cache = self._layers[layer]
        group = self._groups[layer]
        out = torch.empty_like(q)
        if chunks.has_few:
            self._decode(layer, q, cache, self._batch(layer), out, chunks.has_several)
        queries = q[chunks.tokens]
        results = out[chunks.tokens]
        if kernel.gathers:
            keys, values = self._gathered.gather(cache, self._scales[layer], group)
            kernel.run_gathered(queries, keys, values, results)
        else:
            kernel.run_paged(queries, cache, chunks.pages[group], results)
        return out.view(out.shape[0], -1)

    def _page_starts(self, batch: AttentionBatch) -> NDArray[np.int32]:
        """Return where each sequence begins in a list of the pages of all: [num_seqs + 1]."""
        starts = np.zeros(len(batch.seq_lens) + 1, dtype=np.int32)
        np.cumsum(-(-batch.seq_lens // self._page), out=starts[1:])
        return starts

    def _list_pages(self, batch: AttentionBatch) -> None:
        for lists, group_batch in zip(self._lists, batch.by_group, strict=True):
            lists.build(group_batch, int(batch.seq_lens.max()))

    def _pages(self, query_starts: Tensor, rows: slice) -> list[Pages]:
        return [Pages(query_starts, *lists.of(rows), lists.pages) for lists in self._lists]

    def _pays(self, lengths: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> bool:
        """Whether enough queries see the keys of these sequences that gathering them saves time."""
        keys = seq_lens.astype(np.int64)
        return bool((lengths * keys).sum() >= self._queries_per_key * keys.sum())


def _padded(values: NDArray[np.int32], size: int) -> Tensor:
    """Return ``values`` as a tensor of ``size``; the last one fills the rest."""
    return torch.from_numpy(np.pad(values, (0, size - len(values)), mode="edge"))
