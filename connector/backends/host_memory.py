"""Worker sides of host memory for KV: threads that copy blocks between the device of a rank and host memory.

    step loop ──copy──► queue of loads  ──► thread ─┐ copies runs of adjacent blocks, one order after the other
                  └───► queue of stores ──► thread ─┴► results ──poll──► step loop

Memory is allocated piece by piece while the node serves: zeroing and pinning 64 GB takes many seconds. A piece is
usable once it is pinned. If the host runs out of memory, the pieces so far are all.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from connector.backends.lane import Lane
from connector.setup import ConnectorSetup
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.errors import PdserveError
from pdserve.host import memory_limits
from pdserve.host.process import log_failure
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.kv.states import RankStates

_log = logging.getLogger(__name__)

_PIECE_BYTES = 128 << 20  # pinning more at once would delay launches of steps for longer
_ZEROED_AT_ONCE = 16 << 20  # bytes
_RESERVE = 1 << 30  # bytes that stay free for other processes, at most a 32nd of the memory
_HUGE_PAGES = 14  # MADV_HUGEPAGE: pinning takes a tenth of the time


class Run(NamedTuple):
    """Adjacent items on the device and in one piece of host memory."""

    first: int  # on the device
    host_first: int
    length: int  # items


def runs(items: Sequence[int], host_items: Sequence[int], per_piece: int) -> Iterator[Run]:
    """Yield the longest runs, in order. No run crosses a piece of ``per_piece`` items."""
    start = 0
    for index in range(1, len(items) + 1):
        if index < len(items):
            adjacent = items[index] == items[index - 1] + 1 and host_items[index] == host_items[index - 1] + 1
            if adjacent and host_items[index] % per_piece:
                continue
        if items:
            yield Run(items[start], host_items[start], index - start)
        start = index


class HostPlace(NamedTuple):
    """A block or slot in host memory, and the piece of memory that it is in."""

    address: int
    num_bytes: int
    piece: int  # address
    piece_bytes: int


class _Area:
    """Items of one size: the blocks of a KV cache, or slots of recurrent state."""

    def __init__(self, region: KVRegion, item_bytes: int, num_items: int) -> None:
        self.region = region
        self.item_bytes = item_bytes
        self.num_items = num_items  # in host memory, once all of it is allocated
        self.per_piece = max(1, min(num_items, _PIECE_BYTES // item_bytes))
        self.pieces: list[int] = []  # addresses
        self._maps: list[mmap.mmap] = []

    @property
    def num_ready(self) -> int:
        return min(self.num_items, len(self.pieces) * self.per_piece)

    def place(self, item: int) -> HostPlace:
        piece, index = divmod(item, self.per_piece)
        size = self.item_bytes
        address = self.pieces[piece]
        piece_bytes = size * min(self.per_piece, self.num_items - piece * self.per_piece)
        return HostPlace(address + index * size, size, address, piece_bytes)

    @property
    def next_bytes(self) -> int:
        """Size of the next piece; 0 if all are there."""
        return self.item_bytes * min(self.per_piece, self.num_items - self.num_ready)

    def allocate(self) -> int:
        """Map and zero the memory of the next piece; return its address. It is no piece yet."""
        size = self.next_bytes
        self._maps.append(mapped := mmap.mmap(-1, size))
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _HUGE_PAGES)  # an attempt
        for begin in range(0, size, _ZEROED_AT_ONCE):
            ctypes.memset(address + begin, 0, min(_ZEROED_AT_ONCE, size - begin))
        return address

    def moves(self, items: Sequence[int], host_items: Sequence[int]) -> Iterator[Move]:
        size = self.item_bytes
        for first, host_first, length in runs(items, host_items, self.per_piece):
            piece, place = divmod(host_first, self.per_piece)
            yield Move(self, first * size, piece, place * size, length * size)


class Move(NamedTuple):
    """A range of bytes of an area, on the device and in one piece of host memory."""

    area: _Area
    begin: int  # on the device
    piece: int
    piece_begin: int
    num_bytes: int


class _Results:
    """Filled on any thread, drained by ``poll``; each result is followed by a call of ``on_progress``."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._ended: list[CopyResult] = []
        self._room: HostRoom | None = None

    def ended(self, result: CopyResult) -> None:
        with self._lock:
            self._ended.append(result)
        self._on_progress()

    def grown(self, room: HostRoom) -> None:
        with self._lock:
            self._room = room
        self._on_progress()

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        if not self._ended and self._room is None:
            return (), ()
        with self._lock:
            ended = tuple(self._ended)
            self._ended = []
            room = self._room
            self._room = None
        return ended, () if room is None else (room,)


class CopyingHostMemory(ABC):
    """Implements pdserve.protocols.HostMemory. A subclass says how a device copies."""

    def __init__(
        self,
        room: HostRoom,
        region: KVRegion,
        layout: KVLayout,
        states: RankStates | None,
        on_progress: Callable[[], None],
    ) -> None:
        self._blocks = _Area(region, layout.block_bytes, room.num_blocks)
        self._areas = [self._blocks]
        if states is not None:
            self._slots = _Area(states.region, states.layout.slot_bytes, room.num_slots)
            self._areas.append(self._slots)
        self._device_id = region.device_id
        self._results = _Results(on_progress)
        self._closed = False
        self._lanes = {
            load: Lane(f"kv {'loads' if load else 'stores'}", partial(self._begin, load), self._execute)
            for load in (True, False)
        }
        self._growing = threading.Thread(target=self._grow, name="kv memory", daemon=True)

    def allocate(self) -> None:
        self._growing.start()

    def copy(self, order: HostCopy) -> None:
        self._lanes[order.load].put(order)

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        return self._results.poll()

    def place(self, number: int, slot: bool) -> HostPlace:
        """Return where a block is in host memory; with ``slot`` a slot of recurrent state."""
        return (self._slots if slot else self._blocks).place(number)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        if self._growing.is_alive():
            self._growing.join()

    # ------------------------------------------------------------ a subclass's own

    @abstractmethod
    def _begin(self, load: bool) -> None:
        """Prepare the thread of loads or of stores."""

    @abstractmethod
    def _pin(self, area: _Area, address: int, num_bytes: int) -> str:
        """Prepare a piece of host memory for copies. Return why that is not possible, or an empty string."""

    @abstractmethod
    def _copy(self, moves: Sequence[Move], load: bool) -> None:
        """Copy ranges, and wait for the end. Raises RuntimeError."""

    # ------------------------------------------------------------ on threads

    def _grow(self) -> None:
        try:
            for area in reversed(self._areas):  # slots are few, and blocks are of little use without
                while area.next_bytes and not self._closed:
                    problem = self._add_piece(area)
                    if problem:
                        sizes = (area.num_ready * area.item_bytes / 2**30 for area in self._areas)
                        _log.warning("host memory for KV stays at %.2f GiB: %s", sum(sizes), problem)
                        return
                    self._results.grown(HostRoom(*(area.num_ready for area in self._areas)))
        except Exception as exc:
            log_failure(_log, exc)

    def _add_piece(self, area: _Area) -> str:
        size = area.next_bytes
        free = memory_limits.free_memory()
        usable = memory_limits.usable_memory()
        reserve = min(_RESERVE, (usable or 0) // 32)
        if free is not None and size + reserve > free:
            return f"{free / 2**30:.2f} GiB of memory are free on this host; lower --host-kv-memory"
        try:
            address = area.allocate()
        except OSError as exc:
            return f"{exc}; lower --host-kv-memory"
        problem = self._pin(area, address, size)
        if not problem:
            area.pieces.append(address)
        return problem

    def _execute(self, order: HostCopy) -> None:
        start = time.perf_counter()
        moves = list(self._blocks.moves(order.blocks, order.host_blocks))
        if order.slots:
            moves += self._slots.moves(order.slots, order.host_slots)
        error = ""
        try:
            self._copy(moves, order.load)
        except (RuntimeError, PdserveError) as exc:
            error = f"{type(exc).__name__}: {exc}"
        num_bytes = sum(move.num_bytes for move in moves)
        self._results.ended(CopyResult(order.copy_id, error, num_bytes, time.perf_counter() - start))


class CpuHostMemory(CopyingHostMemory):
    """For a device that is the host itself: plain copies."""

    def _begin(self, load: bool) -> None:
        """Do nothing: any thread can copy."""

    def _pin(self, area: _Area, address: int, num_bytes: int) -> str:
        return ""

    def _copy(self, moves: Sequence[Move], load: bool) -> None:
        for area, begin, piece, piece_begin, num_bytes in moves:
            device = area.region.address + begin
            host = area.pieces[piece] + piece_begin
            ctypes.memmove(*((device, host) if load else (host, device)), num_bytes)


class CudaHostMemory(CopyingHostMemory):
    """For a GPU: pinned memory, and copies on streams of their own that no step waits for."""

    def __init__(self, *setup: Any) -> None:
        import torch

        self._torch = torch
        self._streams: dict[bool, Any] = {}  # True: loads, False: stores
        self._on_device: dict[_Area, Any] = {}  # [bytes] uint8, device
        self._pieces: dict[_Area, list[Any]] = {}  # [bytes] uint8 each, pinned
        super().__init__(*setup)

    def _begin(self, load: bool) -> None:
        self._torch.cuda.set_device(self._device_id)
        self._streams[load] = self._torch.cuda.Stream(self._device_id)

    def _pin(self, area: _Area, address: int, num_bytes: int) -> str:
        torch = self._torch
        torch.cuda.set_device(self._device_id)
        if result := int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)):
            return f"cudaHostRegister of {num_bytes} bytes failed with error {result}"
        if area not in self._pieces:
            self._pieces[area] = []
            self._on_device[area] = torch.as_tensor(_DeviceBytes(area.region), device=f"cuda:{self._device_id}")
        memory = (ctypes.c_char * num_bytes).from_address(address)
        self._pieces[area].append(torch.frombuffer(memory, dtype=torch.uint8))
        return ""

    def _copy(self, moves: Sequence[Move], load: bool) -> None:
        torch = self._torch
        with torch.inference_mode(), torch.cuda.stream(self._streams[load]):
            for area, begin, piece, piece_begin, num_bytes in moves:
                device = self._on_device[area][begin : begin + num_bytes]
                host = self._pieces[area][piece][piece_begin : piece_begin + num_bytes]
                (device if load else host).copy_(host if load else device, non_blocking=True)
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        ended.synchronize()


class _DeviceBytes:
    """A region of device memory, for torch.as_tensor."""

    def __init__(self, region: KVRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


class SimulatedHostMemory:
    """The host memory of simulated nodes: copies take the time of a cost model, and move nothing."""

    def __init__(
        self, room: HostRoom, layout: KVLayout, states: RankStates | None, costs: SimulatedCosts, on_progress: Any
    ) -> None:
        self._layout = layout
        self._slot_bytes = 0 if states is None else states.layout.slot_bytes
        self._costs = costs
        self._results = _Results(on_progress)
        self._room = room
        self._lanes = {load: Lane(f"kv copies {load}", lambda: None, self._execute) for load in (True, False)}

    def allocate(self) -> None:
        self._results.grown(self._room)

    def copy(self, order: HostCopy) -> None:
        self._lanes[order.load].put(order)

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        return self._results.poll()

    def close(self) -> None:
        lanes = self._lanes
        self._lanes = {}
        for lane in lanes.values():
            lane.close()

    def _execute(self, order: HostCopy) -> None:
        num_bytes = len(order.blocks) * self._layout.block_bytes + len(order.slots) * self._slot_bytes
        num_tokens = num_bytes / self._layout.bytes_per_token / len(self._layout.groups.windows)
        seconds = self._costs.of_host_copy(num_tokens)
        time.sleep(seconds)
        self._results.ended(CopyResult(order.copy_id, "", num_bytes, seconds))


def build_host_memory(
    room: HostRoom, region: KVRegion, layout: KVLayout, setup: ConnectorSetup, on_progress: Callable[[], None]
) -> CopyingHostMemory | SimulatedHostMemory:
    """Return the host memory of one rank. ``on_progress`` is called from any thread."""
    if setup.costs is not None:
        return SimulatedHostMemory(room, layout, setup.states, setup.costs, on_progress)
    kind = CudaHostMemory if region.device == "cuda" else CpuHostMemory
    return kind(room, region, layout, setup.states, on_progress)
