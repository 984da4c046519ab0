"""Reads between KV caches of one process, by memmove: same Protocol, same checks, no network."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from connector.planning.rank_mapping import LocalRank, SourcePart, SourceRank
from connector.planning.regions import check_region
from connector.planning.transfer_plan import ReadChunk, plan_read
from connector.serial_connector import SerialConnector
from connector.setup import ConnectorSetup
from pdserve.errors import PeerError
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.kv.transports import Connected
from pdserve.records import KVRead, Peer, RankKV, ReadResult

_registry: dict[str, LocalConnector] = {}  # by agent
_registry_lock = threading.Lock()


class LocalConnector(SerialConnector):
    """Copies blocks from connectors of this process, found by agent name."""

    def __init__(self, setup: ConnectorSetup) -> None:
        self._local_rank = LocalRank(setup.shares, setup.rank, setup.states)
        super().__init__(setup.agent, b"local", self._local_rank.share, setup.states)
        self._memory = threading.Lock()  # held during copies out of our region
        self._sources: dict[str, tuple[SourceRank, ...]] = {}  # by epoch; of the connector's thread

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        check_region(region, layout.total_bytes, f"{layout.num_blocks} blocks")
        if region.device != "cpu":
            raise PeerError(f"the local connector copies host memory, not {region.device}; use the nixl connector")
        with _registry_lock:
            _registry[self._agent] = self
        return super().register(region, layout, on_progress)

    def close(self) -> None:
        with _registry_lock:
            if _registry.get(self._agent) is self:
                del _registry[self._agent]
        with self._memory:  # no copy out of our region is under way, and none begins any more
            pass
        super().close()

    def _connect_to(self, peer: Peer) -> Connected:
        sources = self._local_rank.source_ranks(self._rank.layout, peer)
        for source in sources:
            _find(source.rank.agent)
        self._sources[peer.epoch] = sources
        return Connected(peer.epoch, "shm", "memmove")

    def _due_at(self, read: KVRead) -> float:
        return 0.0

    def _execute(self, read: KVRead) -> ReadResult:
        start = time.monotonic()
        num_bytes = num_ranges = 0
        for source in self._sources[read.epoch]:
            for part in source.parts(self._rank):
                for chunk in plan_read(part.read_of(read), part.slices, self._rank.layout.total_bytes):
                    self._move(source, part, chunk)
                    num_bytes += chunk.num_bytes(part.slices)
                    num_ranges += chunk.num_ranges
        return ReadResult(read.read_id, "", num_bytes, num_ranges, time.monotonic() - start)

    def _move(self, source: SourceRank, part: SourcePart, chunk: ReadChunk) -> None:
        target_base = part.local.address
        source_base = part.remote.address
        ranges = part.slices[chunk.number].byte_ranges(chunk.local, chunk.remote)
        with _find(source.rank.agent)._memory:
            _find(source.rank.agent)  # it may have been closed while this thread waited for the lock
            for local, remote, num_bytes in zip(*(column.tolist() for column in ranges), strict=True):
                ctypes.memmove(target_base + local, source_base + remote, num_bytes)


def _find(agent: str) -> LocalConnector:
    with _registry_lock:
        if agent not in _registry:
            raise PeerError(f"no connector {agent!r} in this process; it was closed or never registered")
        return _registry[agent]
