"""Tensors in safetensors files, read in large pieces by threads, through pinned memory to a GPU.

Files are read, not mapped: a file that is truncated meanwhile is an error and no signal, and pages that the kernel
keeps do not count as memory of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.checkpoint.file_states import check_unchanged, open_settled
from pdserve.checkpoint.safetensors_header import Tensor as StoredTensor
from pdserve.errors import CheckpointError
from pdserve.host.cpus import usable_cpus
from pdserve.weights.change import FileState
from runner.loading.stored_dtypes import TORCH_DTYPES

_MAX_THREADS = 8
_READ = 4 << 20  # bytes of one thread at a time
_STAGING = 64 << 20  # bytes of pinned memory, twice: one half is filled while the other one is copied


class OpenFile(NamedTuple):
    path: Path
    fd: int
    state: FileState

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``begin``. Raises CheckpointError if the file ends before."""
        done = 0
        while done < len(buffer):
            size = os.preadv(self.fd, [buffer[done:]], begin + done)  # releases the GIL
            if size == 0:
                raise CheckpointError(f"{self.path} was truncated at byte {begin + done} while it was read")
            done += size


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file, and check at the end that it has not changed. Raises CheckpointError."""
    with open_settled(path) as (fd, state):
        yield OpenFile(path, fd, state)
        check_unchanged(path, state)


class FileReader:
    """Reads ranges of files into memory of a device. Any thread may read; to a GPU, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus()), "weights")
        self._lock = threading.Lock()  # for the staging memory
        self._staging: list[tuple[Tensor, Any]] = []  # pinned memory, and the end of the last copy from it

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._staging:
            torch.cuda.synchronize(self._device)
        self._pool.shutdown()

    def read(self, file: OpenFile, begin: int, end: int) -> Tensor:
        """Return bytes ``begin`` … ``end`` - 1, uint8. Raises CheckpointError and OSError."""
        data = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        if self._device.type == "cpu":
            self._read_into(file, begin, data)
            return data
        with self._lock:
            for at in range(0, len(data), _STAGING):
                some = data[at : at + _STAGING]
                memory, copied = self._next_staging()
                copied.synchronize()
                self._read_into(file, begin + at, memory[: len(some)])
                some.copy_(memory[: len(some)], non_blocking=True)
                copied.record()
        return data

    def _read_into(self, file: OpenFile, begin: int, memory: Tensor) -> None:
        buffer = memory.numpy().data
        if len(buffer) <= _READ:
            file.read_into(begin, buffer)
            return
        starts = range(0, len(buffer), _READ)
        list(self._pool.map(lambda at: file.read_into(begin + at, buffer[at : at + _READ]), starts))

    def _next_staging(self) -> tuple[Tensor, Any]:
        if not self._staging:
            self._staging = [
                (torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        self._staging.reverse()
        return self._staging[0]


class FileSlice:
    """A tensor in a file with the interface of a slice of safetensors: nothing is read before it is indexed."""

    def __init__(self, reader: FileReader, file: OpenFile, name: str, stored: StoredTensor) -> None:
        self._reader = reader
        self._file = file
        self._stored = stored
        self.origin = name, 0  # the stored tensor, and the place of the first value in it

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        return self._stored.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part. Only the ranges of leading dimensions that it covers are read."""
        rest = list(index) if isinstance(index, tuple) else [index]
        shape = list(self._stored.shape)
        first = 0
        while rest and shape and isinstance(rest[0], int):
            size = shape.pop(0)
            first += range(size)[rest.pop(0)] * prod(shape)
        if rest and shape and isinstance(rest[0], slice) and rest[0].step in (None, 1):
            begin, end, _ = rest[0].indices(shape[0])
            rest[0] = slice(None)
            shape[0] = max(0, end - begin)
            first += begin * prod(shape[1:])
        values = self._read(first, shape)
        return values[tuple(rest)] if rest else values

    def _read(self, first: int, shape: list[int]) -> Tensor:
        if self._stored.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{self._file.path}: tensor {self.origin[0]} has dtype {self._stored.dtype}")
        dtype = TORCH_DTYPES[self._stored.dtype]
        begin = self._stored.begin + first * dtype.itemsize
        return self._reader.read(self._file, begin, begin + prod(shape) * dtype.itemsize).view(dtype).view(shape)
