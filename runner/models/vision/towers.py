"""The vision tower of a model."""

from __future__ import annotations

from pdserve.model.image_processor import ImageProcessor
from pdserve.model.towers.gemma4 import Gemma4Embedder, Gemma4Vision
from pdserve.model.towers.pixtral import PixtralVision
from pdserve.model.vision import AnyVision
from runner.models.vision.attention import PatchAttention
from runner.models.vision.gemma4 import Gemma4Tower
from runner.models.vision.gemma4_embedder import Gemma4EmbedderTower
from runner.models.vision.pixtral import PixtralTower
from runner.models.vision.tower import VisionTower
from runner.placement import TensorPlacement

AnyVisionTower = VisionTower | PixtralTower | Gemma4Tower | Gemma4EmbedderTower


def make_tower(
    config: AnyVision, processor: ImageProcessor, placement: TensorPlacement, attention: PatchAttention | None = None
) -> AnyVisionTower:
    """Return the empty tower, which attends by ``attention``, or as PyTorch does."""
    attention = attention or PatchAttention(placement.use_triton)
    if isinstance(config, PixtralVision):
        return PixtralTower(config, processor, placement, attention)
    if isinstance(config, Gemma4Vision):
        return Gemma4Tower(config, processor, placement, attention)
    if isinstance(config, Gemma4Embedder):
        return Gemma4EmbedderTower(config, processor, placement)
    return VisionTower(config, processor, placement, attention)
