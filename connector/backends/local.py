"""Reads between KV caches of one process, by memmove: same Protocol, same checks, no network."""

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

_registry: dict[str, LocalConnector] = {}  # by agent
_registry_lock = threading.Lock()


class LocalConnector:
    """Copies blocks from connectors of this process, found by agent name. A read starts once no command is waiting."""

    def __init__(self, agent: str, rank: LocalRank = SINGLE_RANK) -> None:
        self._agent = agent
        self._local_rank = rank
        self._completions = CompletionQueue()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-{agent}", daemon=True)
        self._memory = threading.Lock()  # held during copies out of our region
        self._rank: RankKV | None = None
        self._peers: dict[str, tuple[SourceRank, ...]] = {}  # by epoch
        self._pending: deque[KVRead] = deque()

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        check_region(region, layout)
        if region.device != "cpu":
            raise PeerError(f"the local connector copies host memory, not {region.device}; use the nixl connector")
        self._completions.on_progress = on_progress
        self._rank = RankKV(self._agent, b"local", region, layout, self._local_rank.share)
        with _registry_lock:
            _registry[self._agent] = self
        self._thread.start()
        return self._rank

    def connect(self, peer: Peer) -> None:
        self._commands.put(partial(self._connect, peer))

    def disconnect(self, epoch: str) -> None:
        self._commands.put(partial(self._disconnect, epoch))

    def read(self, read: KVRead) -> None:
        self._commands.put(partial(self._read, read))

    def poll(self) -> KVConnectorOutput:
        return self._completions.drain()

    def close(self) -> None:
        with _registry_lock:
            if _registry.get(self._agent) is self:
                del _registry[self._agent]
        with self._memory:
            self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------ on the connector's thread

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(block=not self._pending)
            except queue.Empty:
                self._copy(self._pending.popleft())
                continue
            if command is None:
                return
            command()

    def _connect(self, peer: Peer) -> None:
        assert self._rank is not None
        try:
            sources = self._local_rank.source_ranks(self._rank.layout, peer)
            for source in sources:
                _find(source.rank.agent)
        except PeerError as error:
            self._completions.peer_failed(peer.epoch, str(error))
            return
        self._peers[peer.epoch] = sources
        self._completions.connected(Connected(peer.epoch, "shm", "memmove"))

    def _disconnect(self, epoch: str) -> None:
        self._peers.pop(epoch, None)
        for read in [read for read in self._pending if read.epoch == epoch]:
            self._pending.remove(read)
            self._completions.read_refused(read, f"the connection to epoch {epoch} was given up")

    def _read(self, read: KVRead) -> None:
        if read.epoch not in self._peers:
            self._completions.read_refused(read, f"no connection to epoch {read.epoch}; connect to it first")
        else:
            self._pending.append(read)

    def _copy(self, read: KVRead) -> None:
        assert self._rank is not None
        start = time.monotonic()
        limit, sources = self._rank.layout.total_bytes, self._peers[read.epoch]
        try:
            chunks = [(source, chunk) for source in sources for chunk in plan_read(read, source.slices, limit)]
            for source, chunk in chunks:
                self._move(source, chunk)
        except PeerError as error:
            self._completions.read_refused(read, str(error))
            return
        num_bytes = sum(source.slices.num_bytes * len(chunk.local) for source, chunk in chunks)
        num_ranges = sum(chunk.num_ranges for _, chunk in chunks)
        self._completions.read_ended(ReadResult(read.read_id, "", num_bytes, num_ranges, time.monotonic() - start))

    def _move(self, source: SourceRank, chunk: ReadChunk) -> None:
        assert self._rank is not None
        target_base, source_base = self._rank.region.address, source.rank.region.address
        ranges = source.slices.byte_ranges(chunk.local, chunk.remote)
        with _find(source.rank.agent)._memory:
            _find(source.rank.agent)  # it may have been closed while this thread waited for the lock
            for local, remote, num_bytes in zip(*(column.tolist() for column in ranges), strict=True):
                ctypes.memmove(target_base + local, source_base + remote, num_bytes)


def _find(agent: str) -> LocalConnector:
    with _registry_lock:
        if agent not in _registry:
            raise PeerError(f"no connector {agent!r} in this process; it was closed or never registered")
        return _registry[agent]
