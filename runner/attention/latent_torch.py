"""Attention to latents in plain torch: the reference for the other back ends, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.model_config import ModelConfig
from runner.attention import LatentBackend
from runner.attention.paged_torch import Chunk, PagedTorchAttention
from runner.batch import LatentNorm, RotaryCosSin
from runner.kernels.reference import prepare_latents
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement


class LatentTorchAttention(PagedTorchAttention, LatentBackend):
    """Keys are rows of the cache, shared by all query heads; values are the latents in them."""

    def __init__(self, config: ModelConfig, cache: KVCache, placement: TensorPlacement) -> None:
        super().__init__(config, cache, placement)
        assert config.latent is not None
        self._value_dim = config.latent.kv_lora_rank

    def store_latents(self, layer: int, rows: Tensor, q: Tensor, rotary: RotaryCosSin, norm: LatentNorm) -> None:
        self._store_heads(layer, prepare_latents(rows, q, rotary, norm)[:, None])

    def attend_latents(self, layer: int, q: Tensor, q_rope: Tensor) -> Tensor:
        return self.attend(layer, torch.cat((q, q_rope), dim=2)).view_as(q)

    def _attend_chunk(self, layer: int, chunk: Chunk, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """All heads of a tile's queries are one matrix, as they see the same keys."""
        keys = self._gather(layer, chunk.pages, 1)[0][0, 0]
        for tile in chunk.tiles:
            rows = q[tile.rows]
            seen = keys[: tile.num_keys]
            rows = F.pad(rows, (0, 0, 0, 0, tile.before, tile.after))
            scores = (rows.flatten(0, 1) @ seen.t()).view(*rows.shape[:2], -1).float() * self._specs[layer].scale
            weights = (scores + tile.mask[0, 0][:, None]).softmax(-1).to(seen.dtype)
            attended = (weights.flatten(0, 1) @ seen[:, : self._value_dim]).view(len(rows), -1)
            out[tile.rows] = attended[tile.before : len(rows) - tile.after]
