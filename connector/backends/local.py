"""Reads between KV caches of one process, by memmove. Same Protocol, same checks, no network."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from connector.completion_queue import CompletionQueue
from connector.planning.rank_mapping import SINGLE_RANK, LocalRank, SourceRank, check_region
from connector.planning.transfer_plan import ReadChunk, plan_read
from pdserve.errors import PeerError
from pdserve.kv import KVLayout
from pdserve.records import KVConnectorOutput, KVRead, KVRegion, Peer, RankKV, ReadResult
from pdserve.transports import Connected

_registry: dict[str, LocalConnector] = {}
_registry_lock = threading.Lock()


class LocalConnector:
    """Copies blocks between connectors of this process, found by agent name; each read once no order is left."""

    def __init__(self, agent: str, rank: LocalRank = SINGLE_RANK) -> None:
        self._agent = agent
        self._local_rank = rank
        self._outbox = CompletionQueue()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-{agent}", daemon=True)
        self._memory = threading.Lock()  # held while anybody copies out of our region
        self._rank: RankKV | None = None
        self._peers: dict[str, tuple[SourceRank, ...]] = {}  # by epoch
        self._pending: deque[KVRead] = deque()

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        check_region(region, layout)
        if region.device != "cpu":
            raise PeerError(f"the local connector copies host memory, not {region.device}; use the nixl connector")
        self._outbox.on_progress = on_progress
        self._rank = RankKV(self._agent, b"local", region, layout, self._local_rank.share)
        with _registry_lock:
            _registry[self._agent] = self
        self._thread.start()
        return self._rank

    def connect(self, peer: Peer) -> None:
        self._orders.put(partial(self._connect, peer))

    def disconnect(self, epoch: str) -> None:
        self._orders.put(partial(self._disconnect, epoch))

    def read(self, read: KVRead) -> None:
        self._orders.put(partial(self._read, read))

    def poll(self) -> KVConnectorOutput:
        return self._outbox.drain()

    def close(self) -> None:
        with _registry_lock:
            if _registry.get(self._agent) is self:
                del _registry[self._agent]
        with self._memory:
            self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------ on the connector's thread

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(block=not self._pending)
            except queue.Empty:
                self._copy(self._pending.popleft())
                continue
            if order is None:
                return
            order()

    def _connect(self, peer: Peer) -> None:
        assert self._rank is not None
        try:
            found = self._local_rank.source_ranks(self._rank.layout, peer)
            for source in found:
                _owner(source.rank.agent)
        except PeerError as error:
            self._outbox.failed(peer.epoch, str(error))
            return
        self._peers[peer.epoch] = found
        self._outbox.connected(Connected(peer.epoch, "shm", "memmove"))

    def _disconnect(self, epoch: str) -> None:
        self._peers.pop(epoch, None)
        for read in [read for read in self._pending if read.epoch == epoch]:
            self._pending.remove(read)
            self._outbox.refused(read, f"the connection to epoch {epoch} was given up")

    def _read(self, read: KVRead) -> None:
        if read.epoch not in self._peers:
            self._outbox.refused(read, f"no connection to epoch {read.epoch}; connect to it first")
        else:
            self._pending.append(read)

    def _copy(self, read: KVRead) -> None:
        assert self._rank is not None
        start = time.monotonic()
        whole, sources = self._rank.layout.total_bytes, self._peers[read.epoch]
        try:
            pieces = [
                (source, piece) for source in sources for piece in plan_read(read, source.slices, max_bytes=whole)
            ]
            for source, piece in pieces:
                self._move(source, piece)
        except PeerError as error:
            self._outbox.refused(read, str(error))
            return
        num_bytes = sum(source.slices.num_bytes * len(piece.local) for source, piece in pieces)
        num_runs = sum(piece.num_ranges for _, piece in pieces)
        self._outbox.ended(ReadResult(read.read_id, "", num_bytes, num_runs, time.monotonic() - start))

    def _move(self, source: SourceRank, piece: ReadChunk) -> None:
        assert self._rank is not None
        here, there = self._rank.region.address, source.rank.region.address
        ranges = source.slices.byte_ranges(piece.local, piece.remote)
        with _owner(source.rank.agent)._memory:
            _owner(source.rank.agent)  # once more: it may have closed while we waited
            for local, remote, num_bytes in zip(*(column.tolist() for column in ranges), strict=True):
                ctypes.memmove(here + local, there + remote, num_bytes)


def _owner(agent: str) -> LocalConnector:
    with _registry_lock:
        if agent not in _registry:
            raise PeerError(f"no connector {agent!r} in this process; it was closed or never registered")
        return _registry[agent]
