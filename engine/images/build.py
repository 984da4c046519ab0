"""Choose what becomes of images on a node, by its configuration."""

from __future__ import annotations

from functools import partial

from engine.images.encoding import EncodingCosts, ImageEncoding
from engine.images.image_steps import ImagesFactory, no_images
from pdserve.config.node_config import NodeConfig
from pdserve.images import ImageMode


def build_images(config: NodeConfig, block_size: int) -> ImagesFactory:
    """Return what makes the part of a scheduler that has images encoded: nothing without a vision tower."""
    if config.images is not ImageMode.TOWER:
        return no_images
    vision = config.model.vision
    assert vision is not None, "a node with a tower has its configuration"
    assert config.image_input is not None, "a node with a tower knows what images it takes"
    costs = EncodingCosts(
        accepted=config.image_input,
        cache=config.image_cache,
        token_bytes=config.image_token_bytes,
        token_cost=config.image_token_cost,
        least=block_size,
        depth=vision.depth,
        whole=config.model.whole_images,
    )
    return partial(ImageEncoding, costs)
