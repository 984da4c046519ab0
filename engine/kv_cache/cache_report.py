"""Report of the prefix cache: what routers learn of its blocks, and the record of a ``CacheRecorder``."""

from __future__ import annotations

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_recorder import CacheRecorder
from engine.kv_cache.states import States
from pdserve.ipc.cache_changes import CacheChanges
from pdserve.ipc.key_changes import KeyChanges


class CacheReport:
    def __init__(self, pool: BlockPool, states: States) -> None:
        self._pool = pool
        self._states = states
        #: With tiers, hashes that appeared on the device or in a tier, and hashes that are in neither any more.
        self.anywhere: KeyChanges[bytes] | None = None

    def record(self, recorder: CacheRecorder) -> None:
        """Record all further changes of the prefix cache; snapshots of states are in a group of their own."""
        self._pool.recorder = recorder
        self._states.pool.recorder = recorder.states(self._pool.groups.num_groups)

    def take(self, is_due: bool = True) -> tuple[list[bytes], list[bytes], list[CacheChanges]]:
        """Return the hashes of blocks that became available and that were evicted since the last call that was due.

        The third part is the record of these changes, if there is a recorder.
        """
        if not is_due:
            return [], [], []
        added, evicted = self._pool.events.take()
        if self.anywhere is not None:
            added, evicted = self.anywhere.take()
        return added, evicted, self._pool.recorder.take()
