"""Patches of weights: first the whole file is read and checked, then values are written to the model in place.

    file ──threads──► host memory: digests, dtypes, indices ──all ranks agree──► device ──scatter──► weights

So nothing can fail once the first value is written. A patch that is larger than ``keep_bytes`` is read again instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pdserve.checkpoint.weight_patch import PatchEntry, WeightPatch, read_patch
from pdserve.errors import CheckpointError, shown
from pdserve.host.cpus import usable_cpus
from runner.loading.file_slices import opened
from runner.loading.stored_dtypes import TORCH_DTYPES
from runner.loading.stored_weights import StoredWeight, StoredWeights
from runner.models.layers.weight_shard import WeightGroup, WeightShard

_MAX_THREADS = 8
_PIECE = 1 << 22  # values read, and written, at a time


class Piece(NamedTuple):
    """Values of a part of a flattened tensor, on the host."""

    values: Tensor  # [n]
    indices: NDArray[Any] | None  # [n] ascending; None: consecutive
    first: int  # without indices: place of the first value

    def between(self, begin: int, end: int) -> Piece:
        """Return the values at places ``begin`` … ``end`` - 1."""
        if self.indices is None:
            low, high = (min(max(place - self.first, 0), len(self.values)) for place in (begin, end))
            return Piece(self.values[low:high], None, self.first + low)
        low, high = np.searchsorted(self.indices, (begin, end)).tolist()
        return Piece(self.values[low:high], self.indices[low:high], 0)

    def places(self, device: torch.device) -> Tensor:
        """Return the place of each value, [n] int64."""
        if self.indices is None:
            return torch.arange(self.first, self.first + len(self.values), device=device)
        return torch.from_numpy(self.indices).to(device).long()


class CheckedPatch:
    """A patch that fits the weights in memory. Its values are in host memory if they take at most ``keep_bytes``."""

    def __init__(self, path: Path, stored: StoredWeights, keep_bytes: int) -> None:
        """Read and check the whole file. Raises CheckpointError with the first difference of the first entry."""
        self._patch = read_patch(path)
        self._stored = stored
        self._kept: dict[PatchEntry, list[Piece]] | None = None
        num_bytes = sum(tensor.end - tensor.begin for tensor in self._patch.tensors.values())
        try:
            for entry in self._patch.entries:
                _check_entry(entry, self._patch, stored.find(entry.name))
            with opened(path) as self._file, _pool() as pool:
                pieces = list(pool.map(lambda entry: self._read(entry, keep=num_bytes <= keep_bytes), self.entries))
        except (CheckpointError, OSError) as exc:
            raise CheckpointError(f"patch {path}: {exc}") from exc
        if num_bytes <= keep_bytes:
            self._kept = dict(zip(self.entries, pieces, strict=True))

    @property
    def entries(self) -> tuple[PatchEntry, ...]:
        return self._patch.entries

    def apply(self, groups: Iterable[WeightGroup]) -> None:
        """Write the values that belong to this rank. Raises CheckpointError only for a patch that is not kept."""
        if self._kept is not None:
            self._write(groups)
            return
        with opened(self._patch.path) as file:
            if file.state != self._file.state:
                raise CheckpointError(f"{file.path} changed since it was checked")
            self._file = file
            self._write(groups)

    def _write(self, groups: Iterable[WeightGroup]) -> None:
        by_weight: dict[str, list[PatchEntry]] = {}
        for entry in self.entries:
            for part in self._stored.find(entry.name).parts:
                by_weight.setdefault(part.weight, []).append(entry)
        for group in groups:
            touched = {entry: None for name, _ in group.shards() for entry in by_weight.get(name, ())}
            if not touched:
                continue
            group.refill(partial(self._write_entries, touched))

    def _write_entries(self, entries: Iterable[PatchEntry], shards: Mapping[str, WeightShard]) -> None:
        for entry in entries:
            parts = [part for part in self._stored.find(entry.name).parts if part.weight in shards]
            for piece in self._pieces(entry) if self._kept is None else self._kept[entry]:
                for part in parts:
                    _scatter(shards[part.weight], part.first, piece)

    def _read(self, entry: PatchEntry, keep: bool) -> list[Piece]:
        """Check the digests and indices of an entry."""
        keys = [key for key in (entry.indices, entry.values) if key in self._patch.digests]
        hashes = {key: xxhash.xxh3_128() for key in keys}
        size = prod(self._stored.find(entry.name).shape)
        above = -1
        kept = []
        for piece in self._pieces(entry):
            for key in keys:
                array = piece.values.view(torch.uint8).numpy() if key == entry.values else piece.indices
                assert array is not None
                hashes[key].update(array.data)
            if piece.indices is not None:
                _check_indices(entry, piece.indices, above, size)
                above = int(piece.indices[-1])
            if keep:
                kept.append(piece)
        for key in keys:
            if hashes[key].hexdigest() != self._patch.digests[key].lower():
                raise CheckpointError(f"{shown(key)} is damaged: its digest is another; send the patch again")
        return kept

    def _pieces(self, entry: PatchEntry) -> Iterator[Piece]:
        """Read the values of an entry, flattened."""
        shape = self._patch.tensors[entry.values].shape
        first_value = entry.first_row * prod(shape[1:])
        for first in range(0, prod(shape), _PIECE):
            count = min(_PIECE, prod(shape) - first)
            values = torch.from_numpy(self._numbers(entry.values, first, count))
            values = values.view(TORCH_DTYPES[self._patch.tensors[entry.values].dtype])
            if not entry.indices:
                yield Piece(values, None, first_value + first)
                continue
            dtype = np.int64 if self._patch.tensors[entry.indices].dtype == "I64" else np.int32
            yield Piece(values, self._numbers(entry.indices, first, count).view(dtype), 0)

    def _numbers(self, key: str, first: int, count: int) -> NDArray[np.uint8]:
        tensor = self._patch.tensors[key]
        width = (tensor.end - tensor.begin) // max(1, prod(tensor.shape))
        buffer = np.empty(count * width, np.uint8)
        self._file.read_into(tensor.begin + first * width, buffer.data)
        return buffer


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus()), "patch")


def _check_entry(entry: PatchEntry, patch: WeightPatch, stored: StoredWeight) -> None:
    """Compare names, dtypes and shapes."""
    values = patch.tensors[entry.values]
    if values.dtype != stored.dtype:
        raise CheckpointError(
            f"{shown(entry.values)} has dtype {values.dtype}, the checkpoint {stored.dtype}; convert the values"
        )
    if not entry.indices:
        end = entry.first_row + values.shape[0]
        if not stored.shape or values.shape[1:] != stored.shape[1:] or end > stored.shape[0]:
            raise CheckpointError(
                f"{shown(entry.values)} of shape {shown(values.shape)} do not fit into a tensor of shape "
                f"{shown(stored.shape)}"
            )


def _check_indices(entry: PatchEntry, indices: NDArray[Any], above: int, size: int) -> None:
    """Raise CheckpointError unless indices ascend from ``above`` to below ``size``."""
    falls = indices[1:] <= indices[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        above = int(indices[at - 1])
        index = int(indices[at])
    else:
        index = int(indices[0])
    if index <= above and index >= 0:
        problem = f"{index} follows {above}; sort them, each once"
    elif index < 0 or (index := int(indices[-1])) >= size:
        problem = f"{index} is outside of the tensor's {size} values"
    else:
        return
    raise CheckpointError(f"{shown(entry.indices)}: index {problem}")


def _scatter(shard: WeightShard, first: int, piece: Piece) -> None:
    """Write the values of a piece that belong to a shard. The full tensor's first value is at place ``first``."""
    if shard.rows is not None:
        _scatter_rows(shard, shard.rows, first, piece)
        return
    memory = shard.memory
    full_shape = shard.full_shape
    dim = shard.dim
    inner = prod(full_shape[dim + 1 :])
    size = memory.shape[dim]
    begin = first if dim else first + shard.start * inner
    piece = piece.between(begin, first + prod(full_shape) if dim else begin + size * inner)
    if not len(piece.values):
        return
    places = piece.places(memory.device) - begin
    values = piece.values.to(memory.device)
    if dim:
        position = places // inner % full_shape[dim] - shard.start
        mine = (position >= 0) & (position < size)
        outer = places // (inner * full_shape[dim])
        places = ((outer * size + position) * inner + places % inner)[mine]
        values = values[mine]
    elif shard.order is not None:
        rows = places // inner
        heads = len(shard.order)
        inverse = shard.order.argsort().to(memory.device)
        places = (rows // heads * heads + inverse[rows % heads]) * inner + places % inner
    _flat(memory)[_offsets(memory, places)] = values.to(memory.dtype)


def _scatter_rows(shard: WeightShard, rows: Tensor, first: int, piece: Piece) -> None:
    """Write a piece's values to a shard that holds ``rows`` of the full tensor."""
    memory = shard.memory
    inner = prod(shard.full_shape[1:])
    piece = piece.between(first, first + prod(shard.full_shape))
    places = piece.places(memory.device) - first
    values = piece.values.to(memory.device)
    row_in_memory = torch.full((shard.full_shape[0],), -1)
    row_in_memory[rows] = torch.arange(len(rows))
    row = row_in_memory.to(memory.device)[places // inner]
    mine = row >= 0
    places = (row * inner + places % inner)[mine]
    _flat(memory)[_offsets(memory, places)] = values[mine].to(memory.dtype)


def _flat(memory: Tensor) -> Tensor:
    """Return all values between the first and the last one of a tensor in memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    return memory.as_strided((span,), (1,))


def _offsets(memory: Tensor, places: Tensor) -> Tensor:
    """Return the offsets in ``_flat`` of places in the flattened tensor."""
    if memory.is_contiguous():
        return places
    offsets = torch.zeros_like(places)
    for size, stride in zip(reversed(memory.shape), reversed(memory.stride()), strict=True):
        offsets += places % size * stride
        places = places // size
    return offsets
