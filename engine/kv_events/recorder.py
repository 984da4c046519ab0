"""Records the changes of the prefix cache for KV events: which blocks entered it, with their tokens, and which left."""

from __future__ import annotations

from collections.abc import Collection

from engine.kv_cache.cache_recorder import CacheRecorder
from engine.sequence import Sequence
from pdserve.images import block_images
from pdserve.ipc.cache_changes import BlockKey, CacheChanges, Medium, StoredBlock, TierChanges
from pdserve.ipc.key_changes import KeyChanges
from pdserve.ipc.messages import Configure


def recorder_of(configure: Configure) -> CacheRecorder:
    """Return the recorder that an engine needs for its frontend."""
    return NetChanges() if configure.cache_changes else CacheRecorder()


class NetChanges(CacheRecorder):
    """Keeps net changes, so it never outgrows the cache: a block that entered and left between two calls is no change.

    Hashes and tokens of a stored block are copied: they are read in another process.
    """

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[BlockKey, StoredBlock] = {}  # oldest first
        self._removed: dict[BlockKey, None] = {}
        self._tiers = {medium: KeyChanges[BlockKey]() for medium in Medium}

    def store(self, sequence: Sequence, index: int, group: int) -> None:
        hashes = sequence.hashes
        block_hash, parent = hashes.link(index)
        key = group, block_hash
        if key in self._removed:
            del self._removed[key]
            return
        size = hashes.block_size
        request = sequence.request
        tokens = sequence.token_ids[index * size : (index + 1) * size].tobytes()
        images = block_images(request.images, index * size, (index + 1) * size)
        self._stored[key] = StoredBlock(
            group, block_hash, parent, tokens, request.cache_salt, images, request.sampling.adapter
        )

    def remove(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            if self._stored.pop(key, None) is None:
                self._removed[key] = None

    def tier_changed(self, medium: Medium, key: BlockKey, *, added: bool) -> None:
        changes = self._tiers[medium]
        (changes.add if added else changes.remove)(key)

    def states(self, group: int) -> CacheRecorder:
        return _StateRecorder(self, group)

    def clear(self) -> None:
        self._cleared = True
        self._stored.clear()
        self._removed.clear()
        for changes in self._tiers.values():
            changes.clear()

    def take(self) -> list[CacheChanges]:
        tiers = [TierChanges(medium, *reversed(tier.take())) for medium, tier in self._tiers.items() if tier]
        if not (self._cleared or self._stored or self._removed or tiers):
            return []
        changes = CacheChanges(self._cleared, list(self._removed), list(self._stored.values()), tiers)
        self._cleared = False
        self._stored.clear()
        self._removed.clear()
        return [changes]


class _StateRecorder(CacheRecorder):
    """Records snapshots of recurrent states as blocks of one more group, behind those of the KV cache."""

    def __init__(self, recorder: CacheRecorder, group: int) -> None:
        self._recorder = recorder
        self._group = group

    def store(self, sequence: Sequence, index: int, group: int) -> None:
        self._recorder.store(sequence, index, self._group)

    def remove(self, keys: Collection[BlockKey]) -> None:
        self._recorder.remove([(self._group, block_hash) for _, block_hash in keys])

    def tier_changed(self, medium: Medium, key: BlockKey, *, added: bool) -> None:
        _, block_hash = key
        self._recorder.tier_changed(medium, (self._group, block_hash), added=added)
