"""Attention by FlashInfer: kernels that split keys by a plan the host makes once per step. All that knows FlashInfer.

Sequences with one token go to the FA2 kernel with tensor cores, without a causal mask; longer chunks to FA3 on Hopper,
FA2 elsewhere. FA3 gives every query head of every sequence a tile of 128 rows, so single tokens in a mixed batch stay
with FA2 as long as they come first.

This uses the modules below FlashInfer's wrappers, as its own ``fast_decode_plan`` does. The wrappers find maxima by
Python loops over tensors (0.4 ms each for 256 rows), hold 16 MiB for each captured batch size, and write a plan into
pinned memory that the copy of the one before may still be reading when steps overlap.
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
from runner.kernels.pages import PageLists
from runner.kernels.rope_store import rope_store
from runner.kv_cache import KVCache
from runner.linear import Placement

_PLAN_BYTES = 8 << 20  # FlashInfer's own size for a plan
_PLANS_UNDER_WAY = 2  # steps whose plans may be on their way to the device


@dataclass(frozen=True)
class _Rows:
    """Consecutive sequences as a plan needs them, on the host."""

    query_starts: Tensor  # [rows + 1] int32, from 0
    page_starts: Tensor  # [rows + 1] int32
    seq_lens: Tensor  # [rows] int32
    num_tokens: int


@dataclass(frozen=True)
class _Part:
    """Consecutive sequences of a step that one kind of kernel attends."""

    kernels: dict[int | None, _Kernel]  # by window
    tokens: slice
    query_starts: Tensor  # [rows + 1] int32, from 0, device
    page_starts: Tensor  # [rows + 1] int32, device
    last_lens: Tensor  # [rows] int32, device


class FlashInferAttention:
    """Implements AttentionBackend in bfloat16 and float16, with grouped queries and sliding windows."""

    supports_graphs = True

    def __init__(self, config: ModelConfig, cache: KVCache, place: Placement, max_num_seqs: int) -> None:
        layout, device = cache.layout, cache.tensor.device
        self._layers = cache.layers
        self._keys = [layer[:, :, 0] for layer in cache.layers]  # each [pages, kv_heads, page, head_dim]
        self._values = [layer[:, :, 1] for layer in cache.layers]
        self._windows = config.sliding_windows
        self._heads, self._page = config.num_heads, layout.kernel_block_size
        self._lists = PageLists(max_num_seqs, self._page, device)
        self._single_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._device_single_starts = self._single_starts.to(device)
        sizes = _Sizes(config.num_heads, layout.num_kv_heads, layout.head_dim, self._page, place.dtype)
        # Kernels of a step run one after the other, so they can share what they hold between their own two phases.
        workspace = torch.zeros(sizes.workspace_bytes(max_num_seqs, device), dtype=torch.uint8, device=device)
        windows = set(config.sliding_windows)
        self._decode = {window: _Kernel(sizes, workspace, window, causal=False) for window in windows}
        self._prefill = {window: _Kernel(sizes, workspace, window, causal=True) for window in windows}
        self._slots = torch.empty(0, dtype=torch.int64)
        self._parts: list[_Part] = []

    def plan(self, batch: AttentionBatch, graph: bool = False) -> None:
        rows = batch.device_seq_lens.shape[0]
        lengths = np.diff(batch.query_starts)
        longer = np.flatnonzero(lengths != 1)
        singles = int(longer[0]) if len(longer) else rows  # leading sequences with one token, padding included
        seq_lens = np.ones(rows, dtype=np.int32)
        seq_lens[: len(lengths)] = batch.seq_lens
        page_starts = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(-(-seq_lens // self._page), out=page_starts[1:])
        self._slots = batch.slots
        self._lists.build(batch, int(seq_lens.max()))
        self._parts = []
        if singles:
            host = _Rows(
                query_starts=self._single_starts[: singles + 1],
                page_starts=torch.from_numpy(page_starts[: singles + 1]),
                seq_lens=torch.from_numpy(seq_lens[:singles]),
                num_tokens=singles,
            )
            starts = self._device_single_starts[: singles + 1]
            self._add_part(self._decode, host, slice(0, singles), slice(0, singles), starts, graph)
        if singles < rows:
            assert not graph, "graphs are for batches of single tokens"
            host = _Rows(
                query_starts=torch.from_numpy(batch.query_starts[singles:] - singles),
                page_starts=torch.from_numpy(page_starts[singles:]),
                seq_lens=torch.from_numpy(seq_lens[singles:]),
                num_tokens=int(batch.query_starts[-1]) - singles,
            )
            tokens = slice(singles, int(batch.query_starts[-1]))
            starts = batch.device_query_starts[singles:] - singles
            self._add_part(self._prefill, host, slice(singles, rows), tokens, starts, graph)

    def run(self, layer: int, qkv: Tensor, turn: HeadTurn, norms: HeadNorms | None) -> Tensor:
        q = rope_store(qkv, self._heads, turn, norms, self._slots, self._layers[layer])
        out = torch.empty_like(q)
        for part in self._parts:
            kernel = part.kernels[self._windows[layer]]
            kernel.run(
                part, q[part.tokens], self._keys[layer], self._values[layer], self._lists.pages, out[part.tokens]
            )
        return out.view(out.shape[0], -1)

    def _add_part(
        self,
        kernels: dict[int | None, _Kernel],
        host: _Rows,
        rows: slice,
        tokens: slice,
        query_starts: Tensor,
        graph: bool,
    ) -> None:
        for kernel in kernels.values():
            kernel.plan(host, graph)
        self._parts.append(_Part(kernels, tokens, query_starts, *self._lists.of(rows)))


@dataclass(frozen=True)
class _Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype

    def workspace_bytes(self, max_rows: int, device: torch.device) -> int:
        """What partial results of split keys can take: float32 values and a weight for each row of each tile.

        FlashInfer 0.6.13, ``attention/scheduler.cuh``: as many tiles as fill the device twice, or one per sequence and
        (rounded up) as many as the queries need. Tiles of decode have 16 rows where a group fits, those of prefill 128.
        """
        group = self.heads // self.kv_heads
        filled = 2 * torch.cuda.get_device_properties(device).multi_processor_count // self.kv_heads
        tile = 16 if group <= 16 else 128
        decode_rows = tile * max(filled, max_rows * group // tile + 1 + max_rows)
        return self.heads * max(decode_rows, 128 * filled) * (self.head_dim + 1) * 4 + (1 << 20)


class _Kernel:
    """FlashInfer's attention for one sliding window, and the plan it runs by."""

    def __init__(self, sizes: _Sizes, workspace: Tensor, window: int | None, causal: bool) -> None:
        """Compiles the kernel where FlashInfer has not cached it yet, which takes up to a minute."""
        device, dtype = workspace.device, sizes.dtype
        no_encoding = PosEncodingMode.NONE.value
        self._name = determine_attention_backend(device, no_encoding, False, False, dtype, dtype) if causal else "fa2"
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
        self._causal = causal
        self._workspace = workspace
        self._has_pdl = device_support_pdl(device)
        self._device_plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._host_plans = [_HostPlan() for _ in range(_PLANS_UNDER_WAY)]
        self._plan: Any = None  # offsets into the device's plan

    def plan(self, rows: _Rows, graph: bool) -> None:
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
            graph,
            sizes.head_dim,
            sizes.head_dim,
            self._causal,
            self._window_left,
            *of_fa2,
        )
        host_plan.sent.record()

    def run(self, part: _Part, q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, out: Tensor) -> None:
        """Write what queries q see to ``out``, both [tokens, heads, head_dim]."""
        self._module.paged_run(
            self._workspace,
            self._device_plan,
            self._plan,
            q,
            keys,
            values,
            part.query_starts,
            part.page_starts,
            pages,
            part.last_lens,
            out,
            None,  # log of the sums of exp
            (MaskMode.CAUSAL if self._causal else MaskMode.NON_CAUSAL).value,
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
