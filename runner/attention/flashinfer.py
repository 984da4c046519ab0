"""Attention by FlashInfer where it pays: chunks of prompts, by FA3 on Hopper and FA2 elsewhere. All that knows it.

Sequences with one token, and whatever is captured into a graph, are left to our Triton kernels. They need no plan by
the host and are as fast: on an H200 with Llama 8B's heads they read the cache at 3.0 to 3.7 TB/s, and with short
contexts a step of 32 or 256 sequences took 1.25 or 3.13 ms where FlashInfer's tensor-core decode took 1.43 or 3.36
(Qwen3 0.6B).

This uses the modules below FlashInfer's wrappers, as its own ``fast_decode_plan`` does. The wrappers find maxima by
Python loops over tensors (0.5 ms for 256 rows) and write a plan into pinned memory that the copy of the one before may
still be reading when steps overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import (
    MaskMode,
    PosEncodingMode,
    TensorLayout,
    determine_attention_backend,
    device_support_pdl,
)
from torch import Tensor

from pdserve.model_config import ModelConfig
from runner.attention import AttentionBatch, HeadNorms, HeadTurn
from runner.attention.paged_triton import PagedTritonAttention
from runner.kernels.pages import PageLists
from runner.kernels.rope_store import rope_store
from runner.kv_cache import KVCache
from runner.linear import Placement

_PLAN_BYTES = 8 << 20  # FlashInfer's own size for a plan
_TILE = 128  # query rows
_PLANS_UNDER_WAY = 2  # steps whose plans may be on their way to the device


@dataclass(frozen=True)
class _Rows:
    """Consecutive sequences as a plan needs them, on the host."""

    query_starts: Tensor  # [rows + 1] int32, from 0
    page_starts: Tensor  # [rows + 1] int32, counted from the step's first sequence: plans hold them as they are
    seq_lens: Tensor  # [rows] int32
    num_tokens: int


@dataclass(frozen=True)
class _Chunks:
    """The sequences of a step from the first that has several tokens; those before it have one each."""

    has_singles: bool
    tokens: slice
    query_starts: Tensor  # [rows + 1] int32, from 0, device
    page_starts: Tensor  # [rows + 1] int32, device
    last_lens: Tensor  # [rows] int32, device


class FlashInferAttention:
    """Implements AttentionBackend in bfloat16 and float16, with grouped queries and sliding windows."""

    def __init__(self, config: ModelConfig, cache: KVCache, place: Placement, max_num_seqs: int) -> None:
        layout, device = cache.layout, cache.tensor.device
        self._triton = PagedTritonAttention(config, cache, place, max_num_seqs)
        self._layers = cache.layers
        self._keys = [layer[:, :, 0] for layer in cache.layers]  # each [pages, kv_heads, page, head_dim]
        self._values = [layer[:, :, 1] for layer in cache.layers]
        self._windows = config.sliding_windows
        self._heads, self._page = config.num_heads, layout.kernel_block_size
        self._lists = PageLists(max_num_seqs, self._page, device)
        sizes = _Sizes(config.num_heads, layout.num_kv_heads, layout.head_dim, self._page, place.dtype)
        # Kernels of a step run one after the other, so they can share what they hold between their own two phases.
        workspace = torch.zeros(sizes.workspace_bytes(device), dtype=torch.uint8, device=device)
        self._kernels = {window: _Kernel(sizes, workspace, window) for window in set(config.sliding_windows)}
        self._slots = torch.empty(0, dtype=torch.int64)
        self._chunks: _Chunks | None = None

    def plan(self, batch: AttentionBatch, graph: bool = False) -> None:
        self._triton.plan(batch, graph)
        self._chunks = None
        lengths = np.diff(batch.query_starts)
        longer = np.flatnonzero(lengths != 1)
        if graph or not len(longer):
            return
        first, rows = int(longer[0]), len(lengths)
        begin, end = int(batch.query_starts[first]), int(batch.query_starts[-1])
        self._slots = batch.slots
        self._lists.build(batch, int(batch.seq_lens.max()))
        page_starts = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(-(-batch.seq_lens // self._page), out=page_starts[1:])
        host = _Rows(
            query_starts=torch.from_numpy(batch.query_starts[first:] - begin),
            page_starts=torch.from_numpy(page_starts[first:]),
            seq_lens=torch.from_numpy(batch.seq_lens[first:]),
            num_tokens=end - begin,
        )
        for kernel in self._kernels.values():
            kernel.plan(host)
        starts = batch.device_query_starts[first:] - begin
        self._chunks = _Chunks(first > 0, slice(begin, end), starts, *self._lists.of(slice(first, rows)))

    def run(self, layer: int, qkv: Tensor, turn: HeadTurn, norms: HeadNorms | None) -> Tensor:
        chunks = self._chunks
        if chunks is None:
            return self._triton.run(layer, qkv, turn, norms)
        q = rope_store(qkv, self._heads, turn, norms, self._slots, self._layers[layer])
        out = torch.empty_like(q)
        if chunks.has_singles:
            self._triton.attend_singles(layer, q, out)
        self._kernels[self._windows[layer]].run(
            chunks, q[chunks.tokens], self._keys[layer], self._values[layer], self._lists.pages, out[chunks.tokens]
        )
        return out.view(out.shape[0], -1)


@dataclass(frozen=True)
class _Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype

    def workspace_bytes(self, device: torch.device) -> int:
        """What partial results of split keys can take: float32 values and a weight for each row of each tile.

        FlashInfer 0.6.13, ``attention/scheduler.cuh``: keys are split where there are fewer tiles of 128 rows than fill
        the device twice.
        """
        filled = 2 * torch.cuda.get_device_properties(device).multi_processor_count // self.kv_heads
        return self.heads * _TILE * filled * (self.head_dim + 1) * 4 + (1 << 20)


class _Kernel:
    """FlashInfer's attention for one sliding window, and the plan it runs by."""

    def __init__(self, sizes: _Sizes, workspace: Tensor, window: int | None) -> None:
        """Compiles the kernel where FlashInfer has not cached it yet, which takes up to a minute."""
        device, dtype = workspace.device, sizes.dtype
        no_encoding = PosEncodingMode.NONE.value
        self._name = determine_attention_backend(device, no_encoding, False, False, dtype, dtype)
        self._module: Any = get_batch_prefill_module(
            self._name,
            dtype,  # of queries
            dtype,  # of keys and values
            dtype,  # of results
            torch.int32,  # of indices
            sizes.head_dim,
            sizes.head_dim,
            no_encoding,
            window is not None,
            False,  # soft cap of scores
            False,  # float16 products of queries and keys
        )
        self._sizes = sizes
        self._window_left = -1 if window is None else window - 1  # keys before a query's own that it sees
        self._workspace = workspace
        self._has_pdl = device_support_pdl(device)
        self._device_plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._host_plans = [_HostPlan() for _ in range(_PLANS_UNDER_WAY)]
        self._plan: Any = None  # offsets into the device's plan

    def plan(self, rows: _Rows) -> None:
        """Cut the keys of these sequences into the work of the device's processors, and send that there."""
        host_plan = self._host_plans.pop(0)
        self._host_plans.append(host_plan)
        host_plan.sent.synchronize()
        sizes = self._sizes
        of_fa2 = (-1, False, 0) if self._name == "fa2" else ()  # splits of no fixed size, allowed; nothing runs beside
        self._plan = self._module.plan(
            self._workspace,
            self._device_plan,
            host_plan.memory,
            rows.query_starts,
            rows.page_starts,
            rows.seq_lens,
            rows.num_tokens,
            rows.seq_lens.shape[0],
            sizes.heads,
            sizes.kv_heads,
            sizes.page,
            False,  # not for a graph
            sizes.head_dim,
            sizes.head_dim,
            True,  # causal
            self._window_left,
            *of_fa2,
        )
        host_plan.sent.record()

    def run(self, chunks: _Chunks, q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, out: Tensor) -> None:
        """Write what queries q see to ``out``, both [tokens, heads, head_dim]."""
        self._module.paged_run(
            self._workspace,
            self._device_plan,
            self._plan,
            q,
            keys,
            values,
            chunks.query_starts,
            chunks.page_starts,
            pages,
            chunks.last_lens,
            out,
            None,  # log of the sums of exp
            MaskMode.CAUSAL.value,
            TensorLayout.HND.value,
            self._window_left,
            self._has_pdl,
            *(None,) * 6,  # custom mask and its starts, ALiBi slopes, prefix lengths, positions in items, item lengths
            0.0,  # soft cap of scores
            self._sizes.head_dim**-0.5,
            *(None,) * 3,  # scales of 8-bit queries, keys and values
            1.0,  # scale and theta of FlashInfer's own rotary embedding
            1e4,
            0,  # length of positions in items
            self._workspace.shape[0],
        )


class _HostPlan:
    """Pinned memory from which a plan is copied to the device, and whether that has happened."""

    def __init__(self) -> None:
        self.memory = torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()
