"""Memory of a GPU that processes with other GPUs of the same host can write to, by the driver's CUDA IPC.

It is allocated from the driver and not from PyTorch, whose allocator hands out parts of larger allocations, and may
take them back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from pdserve.errors import CapacityError

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """``num_bytes`` of zeroed memory on each rank's GPU, mapped into every rank's process.

    ``addresses[r]`` is where that of rank r is in this one. PyTorch must have made the device current on this thread.
    """

    def __init__(self, num_bytes: int, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """``exchange`` gives every rank's bytes, by rank, to all. Raises CapacityError where the driver refuses."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        own = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), own)
        self._rank = rank
        self.addresses: list[int] = []
        for peer, theirs in enumerate(exchange(bytes(handle))):
            self.addresses.append(own.value if peer == rank else self._open(theirs))

    def close(self) -> None:
        """Unmap and free. Nobody may write any more. Idempotent."""
        for peer, address in enumerate(self.addresses):
            if peer != self._rank:
                self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if self.addresses:
            self._driver.cuMemFree_v2(ctypes.c_uint64(self.addresses[self._rank]))
        self.addresses = []

    def _open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._driver, function)(*args)
        if status:
            raise CapacityError(
                f"{function} failed with CUDA error {status}: the GPUs of a node's tensor shards must be able to reach "
                "each other's memory; check `nvidia-smi topo -p2p w`"
            )
