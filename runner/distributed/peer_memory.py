"""GPU memory that processes with other GPUs of the same host can write to, through the driver's CUDA IPC.

The driver allocates it, not PyTorch: PyTorch's allocator hands out parts of larger allocations and may free them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from pdserve.errors import CapacityError

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_HOST_BYTES = 36  # a UUID
_YES = b"\1"
_NO = b"\0"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def map_memory(num_bytes: int, rank: int, exchange: Callable[[bytes], list[bytes]]) -> PeerMemory | None:
    """Map memory of every rank's GPU into all ranks; return None on all ranks if one cannot reach another.

    ``exchange`` passes one rank's bytes and returns the bytes of all ranks, by rank.
    """
    memory = PeerMemory(num_bytes, rank)
    reached = memory.open_peers(exchange(memory.handle()))
    if all(answer == _YES for answer in exchange(_YES if reached else _NO)):
        return memory
    memory.close()
    return None


class PeerMemory:
    """``num_bytes`` of zeroed memory on each rank's GPU, mapped into every rank's process.

    ``addresses[r]`` is the address of rank r's memory here. PyTorch must have made the device current on this
    thread.
    """

    def __init__(self, num_bytes: int, rank: int) -> None:
        """Allocate this rank's memory. Raises CapacityError if the driver refuses."""
        self.addresses: list[int] = []
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._rank = rank
        self._own = ctypes.c_uint64()
        self._handle = _Handle()
        for function, *args in (
            ("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes)),
            ("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)),
            ("cuCtxSynchronize",),
            ("cuIpcGetMemHandle", ctypes.byref(self._handle), self._own),
        ):
            if status := getattr(self._driver, function)(*args):
                raise CapacityError(
                    f"{function} failed with CUDA error {status} for {num_bytes} bytes that tensor shards share; lower "
                    "--gpu-memory-utilization or end other processes on this GPU"
                )

    def handle(self) -> bytes:
        """Return the host id and IPC handle that other ranks need to map this rank's memory."""
        return _host_id() + bytes(self._handle)

    def open_peers(self, handles: list[bytes]) -> bool:
        """Map the memory of all ranks; return False if one is out of reach."""
        for peer, theirs in enumerate(handles):
            address = ctypes.c_uint64()
            handle = _Handle.from_buffer_copy(theirs, _HOST_BYTES)
            if peer == self._rank:
                address = self._own
            elif not theirs.startswith(_host_id()) or self._driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), handle, _LAZY_PEER_ACCESS
            ):
                return False
            self.addresses.append(address.value)
        return True

    def close(self) -> None:
        """Unmap and free; no rank may write any more. Idempotent."""
        for peer, address in enumerate(self.addresses):
            if peer != self._rank:
                self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        self.addresses = []
        if self._own.value:
            self._driver.cuMemFree_v2(self._own)
            self._own = ctypes.c_uint64()


def _host_id() -> bytes:
    """Return an id of this boot of this host: equal on two ranks only if they share the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:_HOST_BYTES].ljust(_HOST_BYTES)
