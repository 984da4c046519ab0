"""The slot of each token that the linear layers of a step compute.

The last layer may compute fewer tokens than the others: those with logits. Their rows have tiles of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.batch import ADAPTER_TILE, AdapterTiles
from runner.pinned_memory import copied

_TILE_WORDS = 3


class Segment(NamedTuple):
    """The tokens of one slot, for layers in plain torch."""

    slot: int
    tokens: Tensor  # [number] int64: indices among the rows that a layer computes


class TokenSlots:
    """Is filled before the forward pass, and read by every adapted layer."""

    def __init__(self, max_tokens: int, max_slots: int, device: torch.device, use_triton: bool) -> None:
        self.active = False  # whether any token of the step has an adapter; else layers compute the base alone
        self._max_slots = max_slots
        self._device = device
        self._use_triton = use_triton
        self._num_tokens = 0
        self._segments: tuple[list[Segment], list[Segment]] = ([], [])  # all tokens, and tokens with logits
        self._most_tiles = self._num_tiles(max_tokens)
        words = _TILE_WORDS * self._most_tiles + max_tokens if use_triton else 0
        self._words = torch.zeros(2, words, dtype=torch.int32, device=device)  # rows: all tokens, tokens with logits

    def put(self, slots: NDArray[np.int32], kept: NDArray[np.int32]) -> None:
        """Set the slots of a step's tokens [tokens], and of its tokens with logits [kept]; -1: the base.

        Work that is launched before reads the old ones.
        """
        self._num_tokens = len(slots)
        self.active = bool((slots >= 0).any())
        if not self.active:
            return
        some = [slots] if len(kept) == len(slots) else [slots, kept]
        if self._use_triton:
            for words, of_rows in zip(self._words, some, strict=False):
                values = self._tile_words(of_rows)
                words[: len(values)].copy_(copied(values, self._device))
        else:
            lists = [self._segments_of(of_rows) for of_rows in some]
            self._segments = lists[0], lists[-1]

    def capture(self) -> None:
        """Prepare the capture of graphs with adapters, in which no token has one."""
        self._words.zero_()
        self._num_tokens = 0
        self.active = True

    def stop(self) -> None:
        """Let layers compute the base alone."""
        self.active = False

    def tiles(self, rows: int) -> AdapterTiles:
        """Return the tiles of the rows that a layer computes, with padding behind them or none."""
        words = self._words[int(rows < self._num_tokens)]  # a bool would be a mask
        end = _TILE_WORDS * self._most_tiles
        return AdapterTiles(words[:end].view(-1, _TILE_WORDS), words[end:], self._num_tiles(rows))

    def segments(self, rows: int) -> list[Segment]:
        return self._segments[rows < self._num_tokens]

    def _tile_words(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return tiles, as many as a step can have, and the order of the tokens."""
        order = np.argsort(slots, kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]
        used, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
        of_slot = -(-counts // ADAPTER_TILE)
        first = np.repeat(of_slot.cumsum() - of_slot, of_slot)  # the first tile of each tile's slot
        number = np.arange(len(first)) - first
        tiles = np.zeros((self._most_tiles, _TILE_WORDS), dtype=np.int32)
        columns = tiles[: len(number)].T
        columns[0] = np.repeat(used, of_slot)
        columns[1] = np.repeat(starts, of_slot) + number * ADAPTER_TILE
        columns[2] = np.minimum(ADAPTER_TILE, np.repeat(counts, of_slot) - number * ADAPTER_TILE)
        return np.concatenate((tiles.ravel(), order), dtype=np.int32)

    def _segments_of(self, slots: NDArray[np.int32]) -> list[Segment]:
        return [
            Segment(slot, copied(np.flatnonzero(slots == slot), self._device))
            for slot in np.unique(slots).tolist()
            if slot >= 0
        ]

    def _num_tiles(self, rows: int) -> int:
        """Return the most tiles that ``rows`` tokens can have."""
        return min(rows, rows // ADAPTER_TILE + self._max_slots)
