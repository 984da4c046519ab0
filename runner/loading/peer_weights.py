"""Tensors of a checkpoint that are read from a peer's memory in place of the disk.

    a tensor ──parts of the peer's ranks──► staging memory ──digest as on our disk──► the model's memory
                      └ not offered, unreadable, or another digest ──► read from the disk

The digests and sizes are this node's own, and time on a peer is bounded (connector/backends/nixl/weight_transfer.py).
So a peer whose words or bytes are wrong costs some time, but neither the node nor its answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pdserve.checkpoint.weight_digests import tensor_digest
from pdserve.errors import CapacityError, PdserveError
from pdserve.protocols import WeightReader
from pdserve.records import KVRegion
from pdserve.weights.sharing import PartRead, cover, find_tensors
from runner.loading.stored_dtypes import STORED_DTYPES

_log = logging.getLogger(__name__)

_MAX_CORRUPT = 4  # tensors, then a peer is not asked again

_abandoned: list[Any] = []  # staging memory that a hung peer may still write to


class PeerWeights:
    """Reads whole tensors from one peer. ``digests`` are by tensor, as this node's files have them."""

    def __init__(self, reader: WeightReader, digests: Mapping[str, str], device: torch.device) -> None:
        self.num_bytes = 0  # used from the peer
        self.num_tensors = 0
        self.num_corrupt = 0
        self.failure = ""  # reason, once nothing is read from the peer any more
        self._reader = reader
        self._digests = digests
        self._device = device
        self._parts = find_tensors(reader.peer)
        self._largest = 0  # bytes of a tensor that is asked for
        self._staging: Tensor | None = None
        self._host: Tensor | None = None  # pinned copy of the staging memory of a GPU
        self._started = time.monotonic()

    def slice(self, name: str, stored: Any) -> Any:
        """Return ``stored``, a FileSlice, or one in its place that asks the peer first."""
        dtype = stored.get_dtype()
        if name not in self._parts or name not in self._digests or dtype not in STORED_DTYPES:
            return stored
        self._largest = max(self._largest, _num_bytes(dtype, stored.get_shape()))
        return PeerSlice(self, name, stored)

    def fetch(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the tensor, on the device, valid until the next call; None: take it from the disk."""
        num_bytes = _num_bytes(dtype, shape)
        reads = () if self.failure else cover(self._parts[name], shape, num_bytes)
        if not reads:
            return None
        try:
            tensor = self._read(reads, STORED_DTYPES[dtype], shape)
        except PdserveError as exc:
            self._give_up(str(exc))
            return None
        if tensor_digest(dtype, shape, self._host_bytes(tensor)) != self._digests[name]:
            self.num_corrupt += 1
            _log.error("%s from %s is corrupted: it is read from the disk", name, self._reader.peer.name)
            if self.num_corrupt == _MAX_CORRUPT:
                self._give_up(f"{self.num_corrupt} tensors were corrupted")
            return None
        self.num_bytes += num_bytes
        self.num_tensors += 1
        return tensor

    def close(self) -> None:
        """Close the connections, free the staging memory, and log what came from the peer."""
        seconds = time.monotonic() - self._started
        size = f"{self.num_tensors} tensors, {self.num_bytes} B"
        _log.info("weights: %s from %s in %.2f s, the rest from the disk", size, self._reader.peer.name, seconds)
        if not self._reader.drained:
            _abandoned.append((self._staging, self._reader))
        self._reader.close()
        self._staging = self._host = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        _log.warning("%s cannot be read (%s); the other tensors come from the disk", self._reader.peer.name, reason)

    def _read(self, reads: tuple[PartRead, ...], kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        staging = self._open()
        if staging.device.type == "cuda":
            torch.cuda.synchronize(staging.device)  # copies of the last tensor have ended
        self._reader.read(reads)
        parts = []
        for _, part, offset in reads:
            part_shape = (*shape[: part.dim], part.size, *shape[part.dim + 1 :])
            parts.append(staging[offset : offset + part.num_bytes].view(kind).view(part_shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, reads[0].part.dim)

    def _open(self) -> Tensor:
        """Return the staging memory: as large as the largest tensor that is asked for. Raises CapacityError."""
        if self._staging is None:
            size = self._largest
            free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else size
            if size > free:
                raise CapacityError(f"staging memory for a tensor of {size} B does not fit in {free} B")
            try:
                self._staging = torch.empty(size, dtype=torch.uint8, device=self._device)
            except RuntimeError as exc:  # of CPUs as of GPUs
                raise CapacityError(f"staging memory for a tensor of {size} B cannot be allocated") from exc
            address, device = self._staging.data_ptr(), self._device
            self._reader.open(KVRegion(address, size, device.type, device.index or 0))
            _log.info("weights are read from %s", self._reader.peer.name)
        return self._staging

    def _host_bytes(self, tensor: Tensor) -> memoryview:
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.device.type == "cuda":
            if self._host is None or len(self._host) < len(flat):
                self._host = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
            flat = self._host[: len(flat)].copy_(flat)
        return flat.numpy().data


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

    def __getitem__(self, index: Any) -> Tensor:
        found = self._weights.fetch(self._name, self.get_dtype(), tuple(self.get_shape()))
        if found is None:
            part: Tensor = self._stored[index]
            return part
        return found[index].clone()  # the next tensor takes the staging memory
