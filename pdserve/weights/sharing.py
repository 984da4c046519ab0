"""Tensors that a node offers from its memory to nodes that start with the same checkpoint. Plain values, no torch.

A part is contiguous memory with the bytes that the checkpoint has for it. Ranks that split or reorder a tensor offer
its parts, so a reader of any tensor and pipeline parallelism finds each tensor whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pdserve.errors import PeerError, shown
from pdserve.kv.layout import KVRegion

_MAX_AGENT_NAME = 128
_MAX_DEVICE = 1023
_MAX_ADDRESS = 1 << 63


class TensorPart(msgspec.Struct, frozen=True, array_like=True):
    """Rows or columns ``start`` … ``start + size - 1`` of dimension ``dim`` of a tensor, on one rank."""

    name: str  # in the checkpoint
    address: int
    num_bytes: int
    dim: int
    start: int
    size: int


class StoredSize(NamedTuple):
    """The size of a tensor in the checkpoint."""

    shape: tuple[int, ...]
    num_bytes: int


class OfferedMemory(msgspec.Struct, frozen=True):
    """Tensors in a rank's memory, and the allocations that hold them."""

    regions: tuple[KVRegion, ...]
    parts: tuple[TensorPart, ...]


class RankWeights(msgspec.Struct, frozen=True):
    """The tensors that one rank offers, and the metadata to connect to it."""

    agent: str  # NIXL agent name
    metadata: bytes  # NIXL agent metadata
    device: str  # "cpu" or "cuda"
    device_id: int
    parts: tuple[TensorPart, ...]


class WeightPeer(msgspec.Struct, frozen=True):
    """A node that offers the checkpoint of this node."""

    name: str  # address, for logs
    ranks: tuple[RankWeights, ...]


class PartRead(NamedTuple):
    """A part to read, and where it goes in the reader's staging memory, in bytes."""

    rank: RankWeights
    part: TensorPart
    offset: int


def check_rank(rank: RankWeights, sizes: Mapping[str, StoredSize]) -> None:
    """Raise PeerError unless a rank's words fit the checkpoint, whose tensors have ``sizes``.

    Errors beyond these checks make a read fail, or a digest differ.
    """
    if not 0 < len(rank.agent) <= _MAX_AGENT_NAME or rank.device not in ("cpu", "cuda") or rank.device_id > _MAX_DEVICE:
        raise PeerError(f"rank {shown(rank.agent)} is on device {shown(rank.device)} {rank.device_id}, which none has")
    for part in rank.parts:
        size = sizes.get(part.name)
        if size is None:
            raise PeerError(f"tensor {shown(part.name)} is offered, which this checkpoint lacks")
        if not _fits(part, size):
            raise PeerError(
                f"tensor {shown(part.name)} has {size.num_bytes} B and shape {size.shape} here; offered are "
                f"{part.num_bytes} B at {part.address:#x}, {part.size} of dimension {part.dim} from {part.start} on"
            )


def _fits(part: TensorPart, size: StoredSize) -> bool:
    """Return whether a part of such a place and size can be one of the tensor."""
    if not 0 <= part.dim < len(size.shape) or part.size < 1 or part.start + part.size > size.shape[part.dim]:
        return False
    right = part.num_bytes * size.shape[part.dim] == size.num_bytes * part.size
    return right and part.start >= 0 and 0 < part.address < _MAX_ADDRESS - part.num_bytes


def find_tensors(peer: WeightPeer) -> dict[str, list[tuple[RankWeights, TensorPart]]]:
    """Return the offered parts of each tensor."""
    parts_by_name: dict[str, list[tuple[RankWeights, TensorPart]]] = {}
    for rank in peer.ranks:
        for part in rank.parts:
            parts_by_name.setdefault(part.name, []).append((rank, part))
    return parts_by_name


def cover(
    parts: Sequence[tuple[RankWeights, TensorPart]], shape: tuple[int, ...], num_bytes: int
) -> tuple[PartRead, ...]:
    """Choose parts that make up a tensor exactly, in order; none if there are no such parts.

    The parts are a peer's words: none that contradicts ``shape`` or ``num_bytes`` is chosen.
    """
    chosen: list[PartRead] = []
    covered = offset = 0
    for rank, part in sorted(parts, key=lambda item: (item[1].dim, item[1].start)):
        if chosen and (part.dim != chosen[0].part.dim or part.start != covered):
            continue  # ranks may hold copies of a part
        if not chosen and part.start:
            return ()
        if part.dim >= len(shape) or part.size < 1 or part.num_bytes * shape[part.dim] != num_bytes * part.size:
            return ()
        chosen.append(PartRead(rank, part, offset))
        covered += part.size
        offset += part.num_bytes
        if covered == shape[part.dim]:
            return tuple(chosen)
    return ()
