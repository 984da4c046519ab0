"""Attention to latents by FlashInfer for chunks of prompts, and by our Triton kernels for single tokens and in graphs.

Chunks attend to keys and values of heads that are expanded from the rows of their sequences, also from rows that a
prefix cache or another node has computed. A query and a key of one head then take 2 * (192 + 128) operations in place
of 2 * (576 + 512), and each key 2 * 512 * 256 once. Few queries of long sequences are left to the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.model.model_config import ModelConfig
from runner.attention.flashinfer import FlashInferPrefill, Rows, Sizes
from runner.attention.latent_triton import LatentTritonAttention
from runner.batch import AttentionBatch
from runner.kernels.attention.latents import gather_latents
from runner.kernels.gather import TILE
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement

_QUERIES_PER_KEY = 128  # least average for which expanding keys saves time: by the operations above, 170 at equal speed
_SHARE_FOR_KEYS = 64  # expanded keys and values take at most this part of the device's memory


@dataclass(frozen=True)
class _Chunks:
    batch: AttentionBatch  # the sequences from the first one with more than a few tokens
    num_keys: int  # with the rest of each sequence's last tile
    longest: int  # tokens of the longest sequence


class LatentFlashInferAttention(LatentTritonAttention):
    """bfloat16 and float16; keys and values of heads in the sizes that ``attention_backends`` names."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, placement: TensorPlacement, max_num_seqs: int, max_num_keys: int
    ) -> None:
        super().__init__(config, cache, placement, max_num_seqs)
        latent = config.latent
        device = cache.tensor.device
        heads = config.num_heads
        assert latent is not None
        (spec,) = set(config.attention)
        page = cache.layout.kernel_block_size
        sizes = Sizes(heads, heads, latent.qk_head_dim, latent.v_head_dim, page, placement.dtype)
        self._kernel = FlashInferPrefill(sizes, sizes.workspace(device), spec)
        self._nope = latent.qk_nope_head_dim
        per_key = latent.kv_lora_rank + heads * (latent.qk_head_dim + latent.v_head_dim)
        room = torch.cuda.get_device_properties(device).total_memory // _SHARE_FOR_KEYS
        capacity = min(max_num_keys, room // (per_key * placement.dtype.itemsize)) // TILE * TILE
        self._capacity = capacity if self._kernel.gains_by_gathering else 0

        def memory(*size: int) -> Tensor:
            return torch.zeros(self._capacity, *size, dtype=placement.dtype, device=device)

        self._latents = memory(latent.kv_lora_rank)
        self._keys = memory(heads, latent.qk_head_dim)
        self._values = memory(heads, latent.v_head_dim)
        self._chunks: _Chunks | None = None

    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        super()._plan(batch, graph)
        self.first_expanded = None
        self._chunks = None
        lengths = np.diff(batch.query_starts)
        longer = np.flatnonzero(lengths > self._tiles.few)
        if graph or not len(longer):
            return
        first = int(longer[0])
        rows = len(lengths)
        seq_lens = batch.seq_lens[first:]
        key_starts = np.zeros(len(seq_lens) + 1, dtype=np.int32)
        np.cumsum(-(-seq_lens // TILE) * TILE, out=key_starts[1:])
        num_keys = int(key_starts[-1])
        if num_keys > self._capacity or not _pays(lengths[first:], seq_lens):
            return
        begin = int(batch.query_starts[first])
        end = int(batch.query_starts[-1])
        starts = torch.from_numpy(key_starts)
        host = Rows(
            query_starts=torch.from_numpy(batch.query_starts[first:] - begin),
            page_starts=starts,
            key_starts=starts,
            seq_lens=torch.from_numpy(seq_lens),
            num_tokens=end - begin,
        )
        self._kernel.plan(host, gather=True)
        self._chunks = _Chunks(_rows_of(batch, first, rows), num_keys, int(seq_lens.max()))
        self.first_expanded = begin
        if first:
            super()._plan(_rows_of(batch, 0, first), graph)

    def attend_expanded(self, layer: int, q: Tensor, weight: Tensor, out: Tensor) -> None:
        chunks = self._chunks
        assert chunks is not None
        heads = q.shape[1]
        rank = self._latents.shape[1]
        latents, keys, values = (buffer[: chunks.num_keys] for buffer in (self._latents, self._keys, self._values))
        gather_latents(self._layers[layer], chunks.batch, chunks.longest, latents, keys, TILE)
        to_keys, to_values = weight.view(heads, -1, rank).transpose(1, 2).split([self._nope, out.shape[2]], dim=2)
        latents = latents.expand(heads, -1, -1)
        torch.bmm(latents, to_keys, out=keys[:, :, : self._nope].transpose(0, 1))
        torch.bmm(latents, to_values, out=values.transpose(0, 1))
        self._kernel.run_gathered(q, keys, values, out)


def _pays(lengths: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> bool:
    """Whether enough queries see the keys of these sequences that expanding them saves time."""
    keys = seq_lens.astype(np.int64)
    return bool((lengths * keys).sum() >= _QUERIES_PER_KEY * keys.sum())


def _rows_of(batch: AttentionBatch, first: int, end: int) -> AttentionBatch:
    """Return some sequences of a step; ``slots`` still has all tokens."""
    return replace(
        batch,
        query_starts=batch.query_starts[first : end + 1],
        seq_lens=batch.seq_lens[first:end],
        device_query_starts=batch.device_query_starts[first : end + 1],
        device_seq_lens=batch.device_seq_lens[first:end],
        page_table=batch.page_table[first:end],
    )
