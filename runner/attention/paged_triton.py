"""Attention as Triton kernels: for GPUs without FlashInfer, and on CPU tensors in Triton's interpreter.

Sequences with one new token, or a few, are attended by one kernel, longer chunks by another; a mixed batch runs both,
each of which passes over the other's sequences. Lengths and pages are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.config.attention_backends import fits_triton
from pdserve.config.model_config import ModelConfig
from runner.attention import AttentionBatch, HeadNorms, RotaryCosSin
from runner.kernels.decode_attention import SplitDecode
from runner.kernels.prefill_attention import prefill_attention
from runner.kernels.rope_store import rope_store
from runner.kernels.tiles import choose_tiles
from runner.kv_cache import KVCache
from runner.models.layers.linear import TensorPlacement


@dataclass(frozen=True)
class _Step:
    batch: AttentionBatch
    has_few: bool  # sequences with one token, or a few
    has_several: bool  # one of these has several
    has_chunks: bool  # sequences with more


class PagedTritonAttention:
    """Implements AttentionBackend, with grouped queries and sliding windows. Heads hold 16 numbers or a larger power of
    two."""

    def __init__(self, config: ModelConfig, cache: KVCache, place: TensorPlacement, max_num_seqs: int) -> None:
        layout = cache.layout
        assert fits_triton(layout.head_dim), layout.head_dim
        self._layers = cache.layers
        self._windows = config.sliding_windows
        self._heads = config.num_heads
        self._tiles = choose_tiles(config.num_heads // layout.num_kv_heads, layout.head_dim, place)
        self._decode = SplitDecode(
            (config.num_heads, layout.num_kv_heads),
            layout.head_dim,
            config.sliding_windows,
            self._tiles,
            max_num_seqs,
            cache.tensor.device,
        )
        self._step: _Step | None = None

    def plan(self, batch: AttentionBatch, graph: bool = False) -> None:
        lengths, few = np.diff(batch.query_starts), self._tiles.few
        is_mixed = bool((lengths > 1).any())
        if graph:  # replayed with other lengths
            self._step = _Step(batch, True, is_mixed, is_mixed)
        else:
            self._step = _Step(batch, bool((lengths <= few).any()), is_mixed, bool((lengths > few).any()))

    def run(self, layer: int, qkv: Tensor, turn: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        step = self._step
        assert step is not None, "plan comes first"
        cache, window = self._layers[layer], self._windows[layer]
        q = rope_store(qkv, self._heads, turn, norms, step.batch.slots, cache)
        out = torch.empty_like(q)
        if step.has_few:
            self._decode(layer, q, cache, step.batch, out, step.has_several)
        if step.has_chunks:
            prefill_attention(q, cache, step.batch, window, self._tiles, out)
        return out.view(out.shape[0], -1)

    def store(self, layer: int, qkv: Tensor, turn: RotaryCosSin, norms: HeadNorms | None) -> None:
        assert self._step is not None, "plan comes first"
        rope_store(qkv, self._heads, turn, norms, self._step.batch.slots, self._layers[layer])

    def attend_singles(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Write to ``out`` what queries of sequences with one token see, both [tokens, num_heads, head_dim]."""
        assert self._step is not None, "plan comes first"
        self._decode(layer, q, self._layers[layer], self._step.batch, out, several=False)
