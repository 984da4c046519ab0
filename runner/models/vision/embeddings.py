"""The embeddings of images on a device, by digest, in memory of a fixed size.

A token has a row of it, which holds its embedding and what joins the residual after the first layers. An image takes
any free rows, so that memory never fragments. The scheduler counts the rows, and orders what is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.model.towers.vision_config import VisionConfig
from runner.models.vision.tower import Features
from runner.pinned_memory import copied
from runner.placement import TensorPlacement


class ImagePart(NamedTuple):
    """Consecutive tokens of an image, counted without those of text that end rows."""

    digest: bytes
    first: int
    last: int  # the token behind them


class ImageEmbeddings:
    def __init__(self, config: VisionConfig, capacity: int, placement: TensorPlacement) -> None:
        """Allocate ``capacity`` rows."""
        size = config.out_hidden_size
        self._memory = torch.empty(
            1 + len(config.deepstack), capacity, size, dtype=placement.dtype, device=placement.device
        )
        self._free = np.arange(capacity)  # the first ``_num_free`` are free rows
        self._num_free = capacity
        self._rows: dict[bytes, NDArray[np.int64]] = {}

    @property
    def num_free(self) -> int:
        """Free rows."""
        return self._num_free

    def put(self, digest: bytes, features: Features) -> None:
        """Store an image, behind the work on the current stream."""
        count = len(features.embeddings)
        assert digest not in self._rows, f"image {digest.hex()} is encoded twice"
        assert count <= self._num_free, f"an image of {count} tokens is encoded; {self._num_free} rows are free"
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._rows[digest] = rows
        places = copied(rows, self._memory.device)
        self._memory[0].index_copy_(0, places, features.embeddings)
        self._memory[1:].index_copy_(1, places, features.deepstack)

    def drop(self, digest: bytes) -> None:
        """Free the rows of an image. Later work on the current stream may overwrite them. An unknown one is ignored."""
        rows = self._rows.pop(digest, None)
        if rows is not None:
            self._free[self._num_free : self._num_free + len(rows)] = rows
            self._num_free += len(rows)

    def clear(self) -> None:
        for digest in tuple(self._rows):
            self.drop(digest)

    def gather(self, parts: Sequence[ImagePart]) -> Features:
        """Return the rows of these tokens, in order."""
        places = copied(np.concatenate([self._part(part) for part in parts]), self._memory.device)
        gathered = self._memory.index_select(1, places)
        return Features(gathered[0], gathered[1:])

    def _part(self, part: ImagePart) -> NDArray[np.int64]:
        rows = self._rows.get(part.digest)
        assert rows is not None, f"a plan computes tokens of image {part.digest.hex()}, which is not encoded"
        assert part.last <= len(rows), f"image {part.digest.hex()} has {len(rows)} tokens, not {part.last}"
        return rows[part.first : part.last]
