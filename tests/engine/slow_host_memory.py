"""Host memory whose copies end when a test says so, block by block, with the content of the source at that time."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from connector.setup import ConnectorSetup
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import KVLayout, KVRegion


@dataclass
class SlowCopy:
    order: HostCopy
    missing: deque[tuple[bool, int, int]] = field(default_factory=deque)  # (is_state, device place, host place)


class SlowHostMemory:
    def __init__(
        self, room: HostRoom, region: KVRegion, layout: KVLayout, setup: ConnectorSetup, on_progress: Callable[[], None]
    ) -> None:
        states = setup.states
        self.room = room
        self.copies: dict[int, SlowCopy] = {}
        self._regions = (region, region if states is None else states.region)
        self._sizes = (layout.block_bytes, 0 if states is None else states.layout.slot_bytes)
        self.blocks = bytearray(room.num_blocks * self._sizes[0])
        self.slots = bytearray(room.num_slots * self._sizes[1])
        self._results: list[CopyResult] = []
        self._grown: list[HostRoom] = []
        self._on_progress = on_progress

    # ------------------------------------------------------------ a HostMemory

    def allocate(self) -> None:
        self.grow()

    def copy(self, order: HostCopy) -> None:
        missing = [(False, *places) for places in zip(order.blocks, order.host_blocks, strict=True)]
        missing += [(True, *places) for places in zip(order.slots, order.host_slots, strict=True)]
        assert missing, "an empty copy"
        self.copies[order.copy_id] = SlowCopy(order, deque(missing))

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        results = tuple(self._results)
        grown = tuple(self._grown)
        self._results = []
        self._grown = []
        return results, grown

    def close(self) -> None:
        """Nothing to close."""

    def item(self, slot: bool) -> tuple[bytearray, int]:
        """Return the memory of blocks or slots, and the bytes of each."""
        return (self.slots if slot else self.blocks), self._sizes[slot]

    # ------------------------------------------------------------ events

    def grow(self, share: float = 1.0) -> None:
        """Allocate a share of the memory."""
        self._grown.append(HostRoom(int(self.room.num_blocks * share), int(self.room.num_slots * share)))
        self._on_progress()

    def land(self, copy_id: int) -> None:
        """Copy one more block; after the last one, end the copy."""
        copy = self.copies[copy_id]
        if not copy.missing:
            self._end(copy_id, "")
            return
        is_state, place, host_place = copy.missing.popleft()
        size = self._sizes[is_state]
        memory = self.slots if is_state else self.blocks
        device = self._regions[is_state].address + place * size
        host = ctypes.addressof((ctypes.c_char * size).from_buffer(memory, host_place * size))
        ctypes.memmove(*((device, host) if copy.order.load else (host, device)), size)

    def fail(self, copy_id: int) -> None:
        """End a copy with an error; no more of it is copied."""
        self._end(copy_id, "a copy failed")

    def finish(self) -> None:
        """End all copies."""
        for copy_id in list(self.copies):
            while copy_id in self.copies:
                self.land(copy_id)

    def _end(self, copy_id: int, error: str) -> None:
        del self.copies[copy_id]
        self._results.append(CopyResult(copy_id, error, 1, 1e-3))
        self._on_progress()
