"""Attention as Triton kernels: on GPUs without FlashInfer, and on CPU tensors in Triton's interpreter.

One kernel attends sequences with one new token, or a few; another attends longer chunks. A mixed batch runs both, and
each skips the other's sequences. Kernels read lengths and pages on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.config.attention_backends import fits_triton
from pdserve.model.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.batch import AttentionBatch, HeadNorms, RotaryCosSin
from runner.kernels.attention.decode_attention import SplitDecode
from runner.kernels.attention.prefill_attention import prefill_attention
from runner.kernels.attention.rope_store import rope_store
from runner.kernels.attention.store_kv import store_kv
from runner.kernels.tiles import AttentionTiles, choose_tiles
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement


@dataclass(frozen=True)
class _Step:
    batches: tuple[AttentionBatch, ...]  # by group
    has_few: bool  # sequences with one token, or a few
    has_several: bool  # one of these sequences has several
    has_chunks: bool  # sequences with more
    few: int  # tokens of a sequence with a few, at most


class PagedTritonAttention(AttentionBackend):
    """Supports grouped queries, sliding windows and sinks. head_dim is a power of two of at least 16."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        placement: TensorPlacement,
        max_num_seqs: int,
        tiles: AttentionTiles | None = None,
    ) -> None:
        """``config`` has the heads as kernels see them; ``tiles`` None: tiles for keys and values of heads."""
        assert fits_triton(config.head_dim), config.head_dim
        self._layers = cache.layers
        self._groups = cache.groups
        self._scales = cache.scales
        self._specs = config.attention
        self._heads = config.num_heads
        self._tiles = tiles or choose_tiles(config.num_heads // config.num_kv_heads, config.head_dim, placement)
        self._decode = SplitDecode(config, self._tiles, max_num_seqs, cache.tensor.device, cache.scales)
        self._current: _Step | None = None

    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        lengths = np.diff(batch.query_starts)
        few = self._tiles.few if batch.later is None else 1  # only the kernel for chunks has masks of images
        has_few = bool((lengths <= few).any())
        has_chunks = bool((lengths > few).any())
        has_several = bool(((lengths > 1) & (lengths <= few)).any())
        if graph:
            has_few = True
            has_several = graph > 1
            has_chunks = graph > few
        self._decode.plan()
        self._current = _Step(batch.by_group, has_few, has_several, has_chunks, few)

    def prepare_and_store(self, layer: int, qkv: Tensor, rotary: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        slots = self._batch(layer).slots
        cache = self._layers[layer]
        return rope_store(qkv, self._heads, rotary, norms, slots, cache, self._scales[layer])

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        store_kv(k, v, self._batch(layer).slots, self._layers[layer], self._scales[layer])

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        step = self._step
        batch = self._batch(layer)
        cache = self._layers[layer]
        out = torch.empty_like(q)
        if step.has_few:
            self._decode(layer, q, cache, batch, out, step.has_several, sinks)
        if step.has_chunks:
            scales = self._scales[layer]
            prefill_attention(q, cache, batch, self._specs[layer], self._tiles, out, scales, sinks, few=step.few)
        return out.view(out.shape[0], -1)

    def _batch(self, layer: int) -> AttentionBatch:
        """Return the step in the pages of a layer's group."""
        return self._step.batches[self._groups[layer]]

    @property
    def _step(self) -> _Step:
        assert self._current is not None, "plan comes first"
        return self._current
