"""Attention to latents as Triton kernels: on GPUs without FlashInfer, and on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from pdserve.model.model_config import ModelConfig
from runner.attention import LatentBackend
from runner.attention.paged_triton import PagedTritonAttention
from runner.batch import LatentNorm, RotaryCosSin
from runner.kernels.attention.latents import store_latents
from runner.kernels.attention.prefill_attention import prefill_attention
from runner.kernels.tiles import choose_latent_tiles
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement


class LatentTritonAttention(PagedTritonAttention, LatentBackend):
    """kv_lora_rank and qk_rope_head_dim are powers of two of at least 16.

    To the kernels, some query heads share a key head of kv_lora_rank values, and all key heads lie in the same memory.
    """

    def __init__(self, config: ModelConfig, cache: KVCache, placement: TensorPlacement, max_num_seqs: int) -> None:
        assert config.latent is not None
        group, tiles = choose_latent_tiles(config.num_heads, placement)
        as_seen = msgspec.structs.replace(
            config, num_kv_heads=config.num_heads // group, head_dim=config.latent.kv_lora_rank
        )
        super().__init__(as_seen, cache, placement, max_num_seqs, tiles)
        self._rows = [layer.expand(-1, as_seen.num_kv_heads, -1, -1, -1) for layer in cache.layers]

    def store_latents(self, layer: int, rows: Tensor, q: Tensor, rotary: RotaryCosSin, norm: LatentNorm) -> None:
        store_latents(rows, q, rotary, norm, self._batch(layer).slots, self._layers[layer])

    def attend_latents(self, layer: int, q: Tensor, q_rope: Tensor) -> Tensor:
        step = self._step
        batch = self._batch(layer)
        rows = self._rows[layer]
        out = torch.empty_like(q)
        if step.has_few:
            self._decode(layer, q, rows, batch, out, step.has_several, q_rope=q_rope)
        if step.has_chunks:
            prefill_attention(q, rows, batch, self._specs[layer], self._tiles, out, q_rope=q_rope)
        return out
