"""Tensors of a checkpoint that are read from a peer's memory in place of the disk.

    a tensor ──parts of the peer's ranks──► staging memory ──digest as on our disk──► the model's memory
                      └ not offered, unreadable, or another digest ──► read from the disk

Reads of different tensors follow each other, as one fills the network. Digests take longer: several threads compute
them, each with staging memory of its own, and on a GPU piece by piece while the next piece is copied to the host.

The digests and sizes are this node's own, and time on a peer is bounded (connector/backends/nixl/weight_transfer.py).
So a peer whose messages or bytes are wrong costs some time, but neither the node nor its answers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from pdserve.checkpoint.weight_digests import tensor_digest
from pdserve.errors import CapacityError, PdserveError
from pdserve.kv.layout import KVRegion
from pdserve.protocols import WeightReader
from pdserve.weights.sharing import PartRead, cover, find_tensors
from runner.loading.stored_dtypes import STORED_DTYPES
from runner.memory.kv_memory import free_memory

_log = logging.getLogger(__name__)

_THREADS = 4  # one digests about 11 GB/s
_STAGING_FRACTION = 1 / 4  # largest share of the free memory
PIECE_BYTES = 16 << 20  # bytes of pinned memory, twice per thread: one half is digested while the other one is filled
_ALIGNMENT = 512  # bytes
_MAX_CORRUPT = 4  # tensors, after which a peer is not asked again

_abandoned: list[Any] = []  # staging memory that a hung peer may still write to


class PeerWeights:
    """Reads whole tensors from one peer, on any thread. ``digests`` are by tensor, as this node's files have them."""

    threads = _THREADS  # threads that read at the same time

    def __init__(self, reader: WeightReader, digests: Mapping[str, str], device: torch.device) -> None:
        self.num_bytes = 0  # used from the peer
        self.num_tensors = 0
        self.num_corrupt = 0
        self.failure = ""  # reason, once nothing is read from the peer any more
        self._reader = reader
        self._digests = digests
        self._device = device
        self._parts = find_tensors(reader.peer)
        self._largest = 0  # bytes of the largest tensor to read
        self._staging: Tensor | None = None
        self._unused: queue.SimpleQueue[int] = queue.SimpleQueue()  # offsets in ``_staging``, with room for any tensor
        self._lock = threading.Lock()  # for the reader and the counters
        self._pieces = threading.local()
        self._started = time.monotonic()

    def slice(self, name: str, stored: Any) -> Any:
        """Return ``stored``, a FileSlice, or one in its place that asks the peer first."""
        dtype = stored.get_dtype()
        if name not in self._parts or name not in self._digests or dtype not in STORED_DTYPES:
            return stored
        self._largest = max(self._largest, _num_bytes(dtype, stored.get_shape()))
        return PeerSlice(self, name, stored)

    @contextmanager
    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[Tensor | None]:
        """Yield the tensor, on the device, for use on its current stream; None: take it from the disk."""
        reads = cover(self._parts[name], shape, _num_bytes(dtype, shape))
        if not reads or not self._is_open():
            yield None
            return
        first = self._unused.get()
        try:
            tensor = self._read([read._replace(offset=first + read.offset) for read in reads], dtype, shape)
            yield tensor if tensor is not None and self._is_right(name, dtype, shape, tensor) else None
        finally:
            self._unused.put(first)

    def close(self) -> None:
        """Close the connections, free the staging memory, and log what came from the peer."""
        seconds = time.monotonic() - self._started
        size = f"{self.num_tensors} tensors, {self.num_bytes} B"
        _log.info("weights: %s from %s in %.2f s, the rest from the disk", size, self._reader.peer.name, seconds)
        if not self._reader.drained:
            _abandoned.append((self._staging, self._reader))
        self._reader.close()
        self._staging = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        _log.warning("%s cannot be read (%s); the other tensors come from the disk", self._reader.peer.name, reason)

    def _is_open(self) -> bool:
        """Open the reader at the first call. Return whether it can be read from."""
        with self._lock:
            if self._staging is None and not self.failure:
                try:
                    self._open()
                except PdserveError as exc:
                    self._give_up(str(exc))
            return not self.failure

    def _open(self) -> None:
        """Allocate and register staging memory for a tensor per thread, or for fewer. Raises CapacityError."""
        size = max(1, -(-self._largest // _ALIGNMENT)) * _ALIGNMENT
        free = free_memory(self._device) or 0
        if self._device.type == "cuda" and size > free:
            raise CapacityError(f"staging memory for a tensor of {size} B does not fit in {free} B")
        count = min(self.threads, max(1, int(free * _STAGING_FRACTION) // size))
        try:
            self._staging = torch.empty(count * size, dtype=torch.uint8, device=self._device)
        except RuntimeError as exc:  # raised for CPU and GPU memory
            raise CapacityError(f"staging memory for {count} tensors of {size} B cannot be allocated") from exc
        region = KVRegion(self._staging.data_ptr(), count * size, self._device.type, self._device.index or 0)
        self._reader.open(region)
        for index in range(count):
            self._unused.put(index * size)
        _log.info("weights are read from %s", self._reader.peer.name)

    def _read(self, reads: Sequence[PartRead], dtype: str, shape: tuple[int, ...]) -> Tensor | None:
        staging = self._staging
        assert staging is not None
        if staging.device.type == "cuda":
            torch.cuda.current_stream(staging.device).synchronize()  # copies of the last tensor there have ended
        with self._lock:
            if self.failure:
                return None
            try:
                self._reader.read(reads)
            except PdserveError as exc:
                self._give_up(str(exc))
                return None
        first = reads[0].offset
        num_bytes = _num_bytes(dtype, shape)
        values = staging[first : first + num_bytes].view(STORED_DTYPES[dtype])
        dim = reads[0].part.dim
        if not dim:  # parts of rows lie one after the other
            return values.view(shape)
        part_shapes = [(*shape[:dim], part.size, *shape[dim + 1 :]) for _, part, _ in reads]
        parts = values.split([prod(part_shape) for part_shape in part_shapes])
        return torch.cat([part.view(part_shape) for part, part_shape in zip(parts, part_shapes, strict=True)], dim)

    def _is_right(self, name: str, dtype: str, shape: tuple[int, ...], tensor: Tensor) -> bool:
        """Compare the digest, and count the tensor."""
        is_right = tensor_digest(dtype, shape, self._host_pieces(tensor)) == self._digests[name]
        with self._lock:
            if is_right:
                self.num_bytes += tensor.nbytes
                self.num_tensors += 1
                return True
            self.num_corrupt += 1
            _log.error("%s from %s is corrupted: it is read from the disk", name, self._reader.peer.name)
            if self.num_corrupt == _MAX_CORRUPT:
                self._give_up(f"{self.num_corrupt} tensors were corrupted")
        return False

    def _host_pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the bytes; each piece is valid until the next one."""
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.device.type != "cuda":
            yield flat.numpy().data
            return
        if not hasattr(self._pieces, "copies"):
            self._pieces.copies = HostCopies(flat.device)
        yield from self._pieces.copies.of(flat)


class HostCopies:
    """Copies memory of a GPU to the host piece by piece, on a stream of its own. Used on one thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]

    def of(self, flat: Tensor) -> Iterator[memoryview]:
        """Yield the pieces of ``flat`` [bytes] uint8; each is valid until the next one."""
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        pieces = flat.split(PIECE_BYTES)
        self._start(0, pieces)
        for index, piece in enumerate(pieces):
            self._start(index + 1, pieces)
            self._copied[index % 2].synchronize()
            yield self._buffers[index % 2][: len(piece)].numpy().data

    def _start(self, index: int, pieces: Sequence[Tensor]) -> None:
        if index < len(pieces):
            with torch.cuda.stream(self._stream):
                self._buffers[index % 2][: len(pieces[index])].copy_(pieces[index], non_blocking=True)
                self._copied[index % 2].record()


def _num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * STORED_DTYPES[dtype].itemsize


class PeerSlice:
    """Reads a tensor like a slice of safetensors, from the peer or else from ``stored``."""

    def __init__(self, weights: PeerWeights, name: str, stored: Any) -> None:
        self._weights = weights
        self._name = name
        self._stored = stored
        self.origin: tuple[str, int] = stored.origin

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Read the tensor once. Yield it, for use on the current stream of its device, or else ``stored``."""
        with self._weights.tensor(self._name, self.get_dtype(), tuple(self.get_shape())) as tensor:
            yield self._stored if tensor is None else tensor

    def __getitem__(self, index: Any) -> Tensor:
        with self.whole() as tensor:
            part: Tensor = tensor[index]
            return part if tensor is self._stored else part.clone()  # the next tensor takes the staging memory
