"""Adapters in host memory: a rank's part of A and B, ready to be copied to a slot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdserve.adapters.adapter import Adapter
from pdserve.adapters.adapter_files import WEIGHTS_FILE, content_digest
from pdserve.checkpoint.safetensors_header import header_of
from pdserve.errors import CheckpointError, shown
from runner.loading.file_slices import FileReader, FileSlice, opened
from runner.models.adapters.slots import AdapterSlots, LowRankPart
from runner.models.layers.weight_shard import AdapterPlace
from runner.placement import TensorPlacement

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_CPU = torch.device("cpu")


class HostAdapters:
    """Any thread may load and drop adapters; steps read them beside."""

    def __init__(self, slots: AdapterSlots, places: Mapping[str, AdapterPlace], layers: range) -> None:
        """``places`` are those of this rank, which has these ``layers`` of the model."""
        self.slots = slots
        self._places = places
        self._layers = layers
        self._parts: dict[str, Sequence[LowRankPart]] = {}  # by digest

    def load(self, adapter: Adapter) -> None:
        """Read this rank's part of an adapter. Raises CheckpointError, also if its files have changed."""
        if adapter.digest not in self._parts:
            self._parts[adapter.digest] = self._read(adapter)

    def drop(self, digest: str) -> None:
        """Free an adapter's memory; an unknown one is ignored. Copies to slots that have begun still end."""
        self._parts.pop(digest, None)

    def parts(self, digest: str) -> Sequence[LowRankPart]:
        assert digest in self._parts, f"adapter {digest} is not in host memory"
        return self._parts[digest]

    @torch.inference_mode()
    def _read(self, adapter: Adapter) -> list[LowRankPart]:
        path = Path(adapter.directory) / WEIGHTS_FILE
        places = self._places_of(adapter)
        with FileReader(_CPU) as reader, opened(path) as file:
            tensors = header_of(path, file.fd)
            if content_digest(path, file.fd, tensors, adapter.modules) != adapter.digest:
                raise CheckpointError(f"{path} has changed since the adapter was read; load the adapter again")
            memory = _Memory(self._num_values(adapter, places), self.slots.placement)
            parts = []
            for name, place in places.items():
                module = adapter.modules[name]
                a, b = (FileSlice(reader, file, tensor, tensors[tensor])[:].float() for tensor in (module.a, module.b))
                a, b = place.shares_of(a, b.mul_(module.scaling))
                part = LowRankPart(
                    place.linear,
                    place.member,
                    a=memory.filled(path, module.a, a),
                    b=memory.filled(path, module.b, b.t()),
                )
                parts.append(part)
        return parts

    def _places_of(self, adapter: Adapter) -> dict[str, AdapterPlace]:
        """Return this rank's places of an adapter's modules. Raises CheckpointError for a layer without one."""
        places = {}
        for name in adapter.modules:
            layer = _LAYER.match(name)
            if name in self._places:
                places[name] = self._places[name]
            elif layer is None or int(layer[1]) in self._layers:
                raise CheckpointError(f"{adapter.directory} changes {shown(name)}, which takes no adapter on this node")
        return places

    def _num_values(self, adapter: Adapter, places: Mapping[str, AdapterPlace]) -> int:
        return sum(adapter.modules[name].rank * sum(place.memory.shape) for name, place in places.items())


class _Memory:
    """One run of host memory for all values of an adapter; pinned, if they are copied to a GPU."""

    def __init__(self, num_values: int, placement: TensorPlacement) -> None:
        pinned = placement.device.type == "cuda"
        self._values = torch.empty(num_values, dtype=placement.stored, pin_memory=pinned)
        self._used = 0

    def filled(self, path: Path, name: str, values: Tensor) -> Tensor:
        """Return a copy of values in this memory. Raises CheckpointError unless all are finite there."""
        copy = self._values[self._used : self._used + values.numel()].view(values.shape)
        self._used += values.numel()
        copy.copy_(values)
        if not bool(copy.isfinite().all()):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has values that are not finite in {copy.dtype}; train the adapter again"
            )
        return copy
