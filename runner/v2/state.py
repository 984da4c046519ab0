"""What the device knows of sequences, and how the host tells it of changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.kernels.step import WRITE_CHUNK, apply_writes_kernel


class DeviceState:
    """Three tables with a row per slot, all views of one int32 allocation, so that one kernel writes to any of them."""

    def __init__(self, slots: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        sizes = (slots * max_tokens, slots * max_blocks, slots, slots)
        assert sum(sizes) < 2**31, "offsets into the state are int32"
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        token_ids, blocks, self.num_computed, self.num_tokens = self.flat.split(sizes)  # the last two: [slots]
        self.token_ids = token_ids.view(slots, max_tokens)  # [slots, max_tokens]: prompt, then what was sampled
        self.blocks = blocks.view(slots, max_blocks)  # [slots, max_blocks]: block ids from position 0 on

    def places(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], wanted: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Where in ``flat`` tokens at these positions of slots lie, -1 for those that are not wanted."""
        return np.where(wanted, slots * self.token_ids.stride(0) + positions, -1).astype(np.int32)

    def offset(self, table: Tensor, *index: int) -> int:
        """Where an element of one of the tables lies in ``flat``."""
        within = sum(i * stride for i, stride in zip(index, table.stride(), strict=True))
        return int(table.storage_offset()) + within


@dataclass(frozen=True)
class Upload:
    """One step's message to the device: int32 words, and where in it things begin."""

    words: Tensor  # [capacity] int32, device: first num_writes times (destination, source, length)
    num_writes: int
    longest_write: int  # words
    arrays_at: tuple[int, ...]  # word offsets of the arrays given to ``send``

    def array(self, index: int, length: int) -> Tensor:
        """One of the arrays given to ``send``: [length] int32."""
        return self.words[self.arrays_at[index] : self.arrays_at[index] + length]


class Uploader:
    """Collects writes to the state and sends them, with a step's own arrays, in one copy from pinned memory."""

    def __init__(self, capacity: int, max_in_flight: int, device: torch.device) -> None:
        """Made for ``capacity`` words; takes more, too."""
        self._device = device
        self._writes: list[tuple[int, NDArray[np.int32]]] = []
        self._turn = 0
        self._ring = max_in_flight + 2  # those of the steps in flight, one that is written, and one to spare
        self._host: list[Tensor] = []
        self._host_words: list[NDArray[np.int32]] = []  # the same memory
        self._words = torch.empty(0)
        self._allocate(capacity)

    def write(self, destination: int, values: NDArray[np.int32]) -> None:
        """Have ``values`` in the state at ``destination`` before the next step. ``values`` are not copied before."""
        self._writes.append((destination, values))

    def send(self, *arrays: NDArray[np.int32]) -> Upload:
        """Start the copy of all collected writes and ``arrays``; later work on the stream finds them on the device."""
        writes, self._writes = self._writes, []
        head = 3 * len(writes)
        total = head + sum([len(values) for _, values in writes]) + sum([len(array) for array in arrays])
        if total > self._words.numel():
            self._allocate(2 * total)
        host = self._host[self._turn]
        words, at, longest = self._host_words[self._turn], head, 0
        for number, (destination, values) in enumerate(writes):
            words[3 * number : 3 * number + 3] = destination, at, len(values)
            words[at : at + len(values)] = values
            at, longest = at + len(values), max(longest, len(values))
        arrays_at = []
        for array in arrays:
            arrays_at.append(at)
            words[at : at + len(array)] = array
            at += len(array)
        self._words[:total].copy_(host[:total], non_blocking=True)
        self._turn = (self._turn + 1) % self._ring
        return Upload(self._words, len(writes), longest, tuple(arrays_at))

    def apply(self, upload: Upload, state: DeviceState) -> None:
        """Carry out the writes of an upload."""
        if upload.num_writes:
            grid = (upload.num_writes, -(-upload.longest_write // WRITE_CHUNK))
            apply_writes_kernel[grid](state.flat, upload.words, CHUNK=WRITE_CHUNK)

    def _allocate(self, capacity: int) -> None:
        # Copies that are on their way keep what they read: the caching allocators know of them.
        pinned = self._device.type == "cuda"
        self._host = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(self._ring)]
        self._host_words = [words.numpy() for words in self._host]
        self._words = torch.empty(capacity, dtype=torch.int32, device=self._device)
