"""The tensors of a rank that peers may read: all that are in memory as the checkpoint stores them.

On GPUs these are nearly all unquantized weights. On CPUs linear weights are packed, and so not among them.

A shard with rows in another order, as gated delta nets and partial rotary embeddings have them, offers each run of
consecutive rows as a part. A rotary embedding that alternates leaves runs of one row: such tensors are not offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from pdserve.checkpoint.safetensors_header import Tensor as StoredTensor
from pdserve.kv.layout import KVRegion
from pdserve.weights.sharing import OfferedMemory, TensorPart
from runner.loading.stored_dtypes import STORED_DTYPES
from runner.models.layers.weight_shard import WeightShard

_MOST_RUNS = 256  # most runs of a tensor; a reader needs about 0.1 ms for each


def offer_shards(
    shards: Iterable[tuple[str, WeightShard]], stored: Mapping[str, StoredTensor]
) -> tuple[OfferedMemory, list[Tensor]]:
    """Return the parts that equal the checkpoint's bytes, with the tensors that must live as long as the offer."""
    parts: list[TensorPart] = []
    regions: dict[int, KVRegion] = {}
    kept: list[Tensor] = []
    for shard_name, shard in shards:
        name = shard_name if shard_name in stored else shard_name.removeprefix("model.")  # in a body
        memory = shard.memory
        if name not in stored or not _equals_stored(shard, stored[name]):
            continue
        shard_parts = _parts_of(name, shard)
        if not shard_parts:
            continue
        parts += shard_parts
        storage = memory.untyped_storage()
        if storage.data_ptr() not in regions:
            device = memory.device
            regions[storage.data_ptr()] = KVRegion(storage.data_ptr(), storage.nbytes(), device.type, device.index or 0)
            kept.append(memory)
    return OfferedMemory(tuple(regions.values()), tuple(parts)), kept


def _parts_of(name: str, shard: WeightShard) -> list[TensorPart]:
    memory = shard.memory
    if shard.dim:
        return [TensorPart(name, memory.data_ptr(), memory.nbytes, shard.dim, shard.start, memory.shape[shard.dim])]
    runs = shard.runs
    if len(runs) > _MOST_RUNS:
        return []
    pieces = [(memory[at : at + count], row) for at, row, count in runs]
    return [TensorPart(name, piece.data_ptr(), piece.nbytes, 0, row, len(piece)) for piece, row in pieces]


def _equals_stored(shard: WeightShard, stored: StoredTensor) -> bool:
    """Return whether the shard's memory has, and keeps, the dtype and shape of its part in the file, row by row."""
    memory = shard.memory
    shape = list(stored.shape)
    if memory.is_meta or not memory.numel() or memory.ndim != len(shape) or tuple(shape) != shard.full_shape:
        return False
    shape[shard.dim] = memory.shape[shard.dim]
    return list(memory.shape) == shape and memory.is_contiguous() and STORED_DTYPES.get(stored.dtype) == memory.dtype
