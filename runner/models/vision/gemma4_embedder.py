"""The vision part of Gemma 4 12B: one product of each token's pixels, without attention among them.

    pixels of a token ─► patch_ln1, patch_dense, patch_ln2 + positions ─► pos_norm ─► norm, projection ─► embeddings

The reference is Gemma4UnifiedVisionEmbedder of transformers (models/gemma4_unified/modeling_gemma4_unified.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.model.image_processor import ImageProcessor
from pdserve.model.towers.gemma4 import Gemma4Embedder
from pdserve.model.towers.vision_config import CHANNELS
from runner.models.vision.gemma4 import Projection
from runner.models.vision.patches import patches, value_table
from runner.models.vision.tower import patch_places
from runner.placement import TensorPlacement


class Gemma4EmbedderTower(nn.Module):
    """``runner/loading/tower_weights.py`` fills the parameters; then images can be encoded."""

    name = ""  # first part of the parameters' names in checkpoints

    def __init__(self, config: Gemma4Embedder, processor: ImageProcessor, placement: TensorPlacement) -> None:
        super().__init__()
        self.config = config
        self._processor = processor
        with torch.device("meta"):
            self.vision_embedder = _Embedder(config)
            self.embed_vision = Projection(config.hidden_size, config.out_hidden_size, config.norm_eps)
        self.to(placement.dtype).to_empty(device=placement.device).requires_grad_(False)
        self._table = value_table(processor).to(placement.device, placement.dtype)

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Tensor:
        """Return the embedded tokens [tokens, hidden_size]. ``pixels`` as for VisionTower."""
        inputs = patches(pixels.to(self._table.device), self._table, self._processor)
        rows, columns = patch_places(self.config, pixels.shape[0], pixels.shape[1], self._table.device)
        x: Tensor = self.vision_embedder(inputs, rows.places, columns.places)
        return x

    @torch.inference_mode()
    def run(
        self,
        x: Tensor,
        height: int,
        width: int,
        first: int,
        last: int,
        keep: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Return ``x``: there are no layers."""
        return x

    @torch.inference_mode()
    def end(self, x: Tensor) -> Tensor:
        """Return the embeddings [tokens, out_hidden_size] of an image."""
        embeddings: Tensor = self.embed_vision(x)
        return embeddings


class _Embedder(nn.Module):
    def __init__(self, config: Gemma4Embedder) -> None:
        super().__init__()
        self._side = config.patch_size
        size = config.hidden_size
        self.patch_ln1 = nn.LayerNorm(config.patch_values)
        self.patch_dense = nn.Linear(config.patch_values, size)
        self.patch_ln2 = nn.LayerNorm(size)
        self.pos_embedding = nn.Parameter(torch.empty(config.num_positions, 2, size))
        self.pos_norm = nn.LayerNorm(size)

    def forward(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Embed tokens [tokens, 3 · side²] at these rows and columns [tokens]."""
        by_pixel = values.view(-1, CHANNELS, self._side**2).transpose(1, 2).flatten(1)
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(by_pixel)))
        table = self.pos_embedding
        y: Tensor = self.pos_norm(x + (F.embedding(columns, table[:, 0]) + F.embedding(rows, table[:, 1])))
        return y
