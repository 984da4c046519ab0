"""The state of sequences on the device, and the host's changes to it, which are copied once per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.kernels.step import WRITE_CHUNK, apply_writes_kernel

_Index = TypeVar("_Index", int, NDArray[np.int64])


class DeviceState:
    """Token ids, block tables and counts of tokens, with a row per slot.

    All are views of one int32 allocation, so one kernel writes to any of them.
    """

    def __init__(self, slots: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        sizes = (slots * max_tokens, slots * max_blocks, slots, slots)
        assert sum(sizes) < 2**31, "offsets into the state are int32"
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        token_ids, block_tables, self.num_computed, self.num_tokens = self.flat.split(sizes)  # the last two: [slots]
        self.token_ids = token_ids.view(slots, max_tokens)  # [slots, max_tokens]: prompt, then sampled tokens
        self.block_tables = block_tables.view(slots, max_blocks)  # [slots, max_blocks]: block ids from position 0 on
        self._max_tokens = max_tokens
        self._max_blocks = max_blocks
        self._blocks_begin = sizes[0]  # offsets of the tables in ``flat``
        self._computed_begin = sum(sizes[:2])
        self._counts_begin = sum(sizes[:3])

    # Offsets in ``flat`` of elements of the tables, for one slot or arrays of slots.

    def token_offset(self, slot: _Index, position: _Index) -> _Index:
        return slot * self._max_tokens + position

    def block_offset(self, slot: int, index: int) -> int:
        return self._blocks_begin + slot * self._max_blocks + index

    def num_computed_offset(self, slot: _Index) -> _Index:
        return self._computed_begin + slot

    def num_tokens_offset(self, slot: _Index) -> _Index:
        return self._counts_begin + slot

    def token_offsets(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], wanted: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Return the offsets in ``flat`` of tokens at these positions of slots, -1 for unwanted ones."""
        return np.where(wanted, self.token_offset(slots, positions), -1).astype(np.int32)


@dataclass(frozen=True)
class StepWords:
    """One step's int32 words on the device, and the offsets of the arrays among them."""

    words: Tensor  # [capacity] int32, device: first num_writes times (destination, source, length)
    num_writes: int
    longest_write: int  # words
    arrays_at: tuple[int, ...]  # word offsets of the arrays that ``send`` was given
    extra_at: tuple[int, ...]  # word offsets of the arrays that ``stage`` was given

    def array(self, begin: int, length: int) -> Tensor:
        """Return the array that begins at a word offset: [length] int32."""
        return self.words[begin : begin + length]


class StagedWrites:
    """Collects writes to the state, and sends them with a step's arrays in one copy from pinned memory."""

    def __init__(self, capacity: int, max_in_flight: int, device: torch.device) -> None:
        """Reserve ``capacity`` words; a step with more words reserves more."""
        self._device = device
        self._destinations: list[int] = []
        self._lengths: list[int] = []
        self._values: list[NDArray[np.int32]] = []  # values of all writes, one after the other
        self._extra: list[NDArray[np.int32]] = []
        self._next = 0
        self._ring = max_in_flight + 2  # buffers of the steps in flight, one that is being written, one to spare
        self._host: list[Tensor] = []
        self._host_words: list[NDArray[np.int32]] = []  # views of ``_host``
        self._words = torch.empty(0)
        self._allocate(capacity)

    def write(self, destination: int, values: NDArray[np.int32]) -> None:
        """Write ``values`` to the state at ``destination`` before the next step; they are copied only in ``send``."""
        self.write_each([destination], [len(values)], values)

    def write_each(self, destinations: Iterable[int], lengths: Iterable[int], values: NDArray[np.int32]) -> None:
        """Do many writes: the first ``lengths[0]`` values to ``destinations[0]``, the next ones behind, and so on."""
        self._destinations += destinations
        self._lengths += lengths
        self._values.append(values)

    def stage(self, array: NDArray[np.int32]) -> None:
        """Send an array with the next step; its offset is the next of ``StepWords.extra_at``."""
        self._extra.append(array)

    def send(self, *arrays: NDArray[np.int32]) -> StepWords:
        """Start the copy of all writes and arrays. Later work on the stream finds them on the device."""
        lengths = np.array(self._lengths, dtype=np.int32)
        num_writes = len(lengths)
        extra = self._extra
        head = 3 * num_writes
        parts = [*self._values, *arrays, *extra]
        begins = [head, *(head + np.cumsum([len(part) for part in parts])).tolist()]
        total = begins[-1]
        if total > self._words.numel():
            self._allocate(2 * total)
        host = self._host[self._next]
        words = self._host_words[self._next]
        words[0:head:3] = self._destinations
        words[1:head:3] = head + lengths.cumsum() - lengths
        words[2:head:3] = lengths
        np.concatenate(parts, out=words[head:total])
        self._words[:total].copy_(host[:total], non_blocking=True)
        self._next = (self._next + 1) % self._ring
        offsets = tuple(begins[len(self._values) : -1])
        self._destinations = []
        self._lengths = []
        self._values = []
        self._extra = []
        longest = int(lengths.max(initial=0))
        return StepWords(self._words, num_writes, longest, offsets[: len(arrays)], offsets[len(arrays) :])

    def apply(self, sent: StepWords, state: DeviceState) -> None:
        """Launch the writes on the device."""
        if sent.num_writes:
            grid = (sent.num_writes, -(-sent.longest_write // WRITE_CHUNK))
            apply_writes_kernel[grid](state.flat, sent.words, CHUNK=WRITE_CHUNK)

    def _allocate(self, capacity: int) -> None:
        # Memory of copies still on their way is not reused: the caching allocators track them.
        pinned = self._device.type == "cuda"
        self._host = [torch.empty(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(self._ring)]
        self._host_words = [words.numpy() for words in self._host]
        self._words = torch.empty(capacity, dtype=torch.int32, device=self._device)
