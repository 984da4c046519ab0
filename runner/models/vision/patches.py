"""Pixels to the inputs of a vision tower, bit-equal to transformers' Qwen2VLImageProcessorPil in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdserve.model.image_processor import ImageProcessor


def value_table(processor: ImageProcessor) -> Tensor:
    """Return [3, 256] float32: the input of the tower for each value of red, green and blue.

    The library rescales in float64, and normalizes in float32.
    """
    rescaled = (np.arange(256, dtype=np.float64) * processor.rescale_factor).astype(np.float32)
    mean = np.array(processor.mean, np.float32)[:, None]
    std = np.array(processor.std, np.float32)[:, None]
    return torch.from_numpy((rescaled - mean) / std)


def patches(pixels: Tensor, table: Tensor, processor: ImageProcessor) -> Tensor:
    """Return [patches, 3 (colours) · frames · patch_size²] in the dtype of ``table`` [3, 256].

    ``pixels``: uint8 [height, width, 3] on the device of ``table``; the sides are multiples of a token's side. The
    patches of a token are consecutive. All frames are equal.
    """
    size = processor.patch_size
    merge = processor.merge_size
    height, width, colours = pixels.shape
    blocks = pixels.view(height // (size * merge), merge, size, width // (size * merge), merge, size, colours)
    ordered = blocks.permute(6, 0, 3, 1, 4, 2, 5)  # colour, block row and column, row and column in it, pixel
    values = [table[colour][ordered[colour].reshape(-1, 1, size * size).int()] for colour in range(colours)]
    frames = torch.stack(values, dim=1).expand(-1, -1, processor.temporal_patch_size, -1)
    return frames.reshape(len(values[0]), -1)
