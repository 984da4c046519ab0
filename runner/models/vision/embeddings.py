"""The embeddings of images on a device, by digest, in memory of a fixed size.

A token has a row of it, which holds its embedding and what joins the residual after the first layers. An image takes
any free rows, so that memory never fragments. The scheduler counts the rows, and orders what is dropped. An image has
its rows from its first piece on. Its hidden states between two pieces are in memory of their own: one image has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    def __init__(self, config: VisionConfig, capacity: int, largest: int, placement: TensorPlacement) -> None:
        """Allocate ``capacity`` rows, and the hidden states of an image of ``largest`` tokens."""
        size = config.out_hidden_size
        self._memory = torch.empty(
            1 + len(config.deepstack), capacity, size, dtype=placement.dtype, device=placement.device
        )
        self._hidden = torch.empty(
            largest * config.merge_size**2, config.hidden_size, dtype=placement.dtype, device=placement.device
        )
        self._partial: tuple[bytes, int] | None = None  # image with hidden states, and its patches
        self._free = np.arange(capacity)  # the first ``_num_free`` are free rows
        self._num_free = capacity
        self._rows: dict[bytes, NDArray[np.int64]] = {}

    @property
    def num_free(self) -> int:
        """Free rows."""
        return self._num_free

    def reserve(self, digest: bytes, count: int) -> None:
        """Take rows for an image of ``count`` tokens."""
        assert digest not in self._rows, f"image {digest.hex()} is encoded twice"
        assert count <= self._num_free, f"an image of {count} tokens is encoded; {self._num_free} rows are free"
        self._num_free -= count
        self._rows[digest] = self._free[self._num_free : self._num_free + count].copy()

    def put(self, digest: bytes, place: int, values: Tensor) -> None:
        """Store ``values`` [tokens, out_hidden_size] of an image, behind the work on the current stream.

        ``place``: 0 for the embeddings, 1 + n for the n-th deepstack layer.
        """
        self._memory[place].index_copy_(0, copied(self._rows[digest], self._memory.device), values)

    def keep_hidden(self, digest: bytes, x: Tensor) -> None:
        """Keep the hidden states [patches, hidden_size] of an image for its next piece."""
        assert self._partial is None, "pieces of two images alternate"
        self._partial = digest, len(x)
        self._hidden[: len(x)] = x

    def take_hidden(self, digest: bytes) -> Tensor:
        """Return the hidden states of an image, which the next ``keep_hidden`` overwrites."""
        assert self._partial is not None, "a piece follows none"
        assert self._partial[0] == digest, "a piece follows one of another image"
        x = self._hidden[: self._partial[1]]
        self._partial = None
        return x

    def drop(self, digest: bytes) -> None:
        """Free the rows and hidden states of an image. An unknown one is ignored.

        Later work on the current stream may overwrite them.
        """
        if self._partial is not None and self._partial[0] == digest:
            self._partial = None
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
