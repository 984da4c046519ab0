"""Weights between nodes: a source that registers tensors, and a reader that a starting node uses while it loads.

The source does nothing after its start: NIXL's progress thread answers reads, or none where the network reads memory
by itself. A reader works on the thread that loads the model and waits for each tensor.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import Disconnected, NixlAgent, NixlTransfer
from connector.backends.nixl.ucx_sockets import PeerSockets
from connector.planning.block_slicing import BlockRanges
from pdserve.errors import PeerError, shown
from pdserve.records import KVRegion
from pdserve.rpc.timeouts import PeerTiming
from pdserve.weight_sharing import OfferedMemory, PartRead, RankWeights, WeightPeer

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_IN_FLIGHT = 4  # chunks
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 400e-6  # seconds between polls
_END_SECONDS = 1.0  # for chunks in flight to end once their sockets are shut
_SLOWEST = 16 << 20  # bytes/s; below, the disk is no slower
_ONLY = np.zeros(1, np.int32)


class NixlWeightSource:
    """Offers tensors until it is closed. Used on one thread; the memory must live as long."""

    def __init__(self, memory: OfferedMemory, timing: PeerTiming) -> None:
        """Raises CapacityError if the memory cannot be registered."""
        name = f"weights-{secrets.token_hex(8)}"
        self._agent = NixlAgent(name, timing)
        for region in memory.regions:
            self._agent.register(region)
        first = memory.regions[0]
        self.offer = RankWeights(name, self._agent.metadata(), first.device, first.device_id, memory.parts)

    def close(self) -> None:
        """Deregister the memory. Idempotent."""
        self._agent.close()
        ucx.log().forward()


class _Chunk:
    """A part of a read: its transfer and the descriptors that belong to it."""

    def __init__(self, rank: RankWeights, transfer: NixlTransfer, prepared: tuple[int, int]) -> None:
        self.rank = rank
        self.transfer = transfer
        self.prepared = prepared


class NixlWeightReader:
    """Implements pdserve.protocols.WeightReader. After an error the staging memory must not be used again."""

    def __init__(self, peer: WeightPeer, timing: PeerTiming) -> None:
        self.peer = peer
        self._timing = timing
        self._agent: NixlAgent | None = None
        self._staging: KVRegion
        self._connected: dict[str, PeerSockets] = {}  # by agent
        self._flying: list[_Chunk] = []
        self._received = -1  # bytes over TCP at the last look; -1: not counted
        self._budget = timing.stall_timeout  # seconds that reads may take beside those at the slowest rate

    def open(self, staging: KVRegion) -> None:
        self._agent = NixlAgent(f"weight-reader-{secrets.token_hex(8)}", self._timing)
        self._agent.register(staging)
        self._staging = staging

    def read(self, reads: Sequence[PartRead]) -> None:
        for rank, _, _ in reads:  # its time does not count
            self._connect(rank)
        started = time.monotonic()
        self._budget = min(self._budget, self._timing.stall_timeout) + sum(p.num_bytes for _, p, _ in reads) / _SLOWEST
        try:
            waiting = deque(_chunks(reads))
            sleep, moved_at = 0.0, started
            while waiting or self._flying:
                moved = self._poll()
                if waiting and len(self._flying) < _IN_FLIGHT:
                    self._post(*waiting.popleft())
                    moved = True
                if moved:
                    sleep, moved_at = 0.0, time.monotonic()
                    continue
                if time.monotonic() - started > self._budget:
                    raise PeerError(f"it sends less than {_SLOWEST >> 20} MiB/s")
                if time.monotonic() - moved_at > self._timing.stall_timeout / 2:
                    self._check_stall()
                    moved_at = time.monotonic()
                sleep = min(max(2 * sleep, _FIRST_SLEEP), _LONGEST_SLEEP)
                time.sleep(sleep)
        except PeerError:
            self._abort()
            raise
        finally:
            self._budget -= time.monotonic() - started
            ucx.log().forward()

    def close(self) -> None:
        """Close all connections. Leave the agent alone while bytes may still arrive. Idempotent."""
        if self._agent is None or self._flying:
            return
        with suppress(PeerError):  # a broken connection is closed
            for agent in self._connected:
                self._agent.remove(agent)
            self._agent.close()
        self._connected.clear()
        self._agent = None
        ucx.log().forward()

    @property
    def drained(self) -> bool:
        """Whether no byte can reach the staging memory any more."""
        return not self._flying

    def _connect(self, rank: RankWeights) -> None:
        assert self._agent is not None, "open comes first"
        if rank.agent in self._connected:
            return
        sockets = PeerSockets(self._agent.metadata(), rank.metadata)
        found = self._agent.add(rank.metadata)
        if found != rank.agent:
            self._agent.remove(found)
            raise PeerError(f"the peer says it is {shown(rank.agent)}, its NIXL metadata is of {shown(found)}")
        self._connected[rank.agent] = sockets

    def _post(self, rank: RankWeights, remote: KVRegion, offset: int) -> None:
        agent = self._agent
        assert agent is not None
        here = KVRegion(self._staging.address + offset, remote.num_bytes, self._staging.device, self._staging.device_id)
        whole = BlockRanges.whole(remote.num_bytes, 1)
        local = agent.prepare(None, here, whole)
        there = agent.prepare(rank.agent, remote, whole)
        chunk = _Chunk(rank, agent.read(local, _ONLY, there, _ONLY), (local, there))
        self._flying.append(chunk)
        try:
            done = chunk.transfer.post()
        except Disconnected:
            self._end(chunk)
            raise
        if done:
            self._end(chunk)

    def _poll(self) -> bool:
        """Poll chunks in flight. Return whether one has ended."""
        moved = False
        for chunk in list(self._flying):
            try:
                done = chunk.transfer.done()
            except Disconnected:
                self._end(chunk)
                raise
            if done:
                self._end(chunk)
                moved = True
        return moved

    def _end(self, chunk: _Chunk) -> None:
        assert self._agent is not None
        self._flying.remove(chunk)
        chunk.transfer.release()
        for prepared in chunk.prepared:
            self._agent.release(prepared)

    def _check_stall(self) -> None:
        """No chunk has ended for half a stall timeout. That is no stall while bytes arrive over TCP sockets."""
        received = sum(sockets.received_bytes() for sockets in self._connected.values())
        if self._received != received:
            self._received = received
            return
        raise PeerError(f"no byte arrived for {self._timing.stall_timeout:g} s: it hangs or its network is cut")

    def _abort(self) -> None:
        """Make the transfers in flight end, by shutting the sockets to the peer."""
        if not self._flying:
            return
        for sockets in self._connected.values():
            sockets.shut()
        end = time.monotonic() + _END_SECONDS
        while self._flying and time.monotonic() < end:
            with suppress(PeerError):
                self._poll()
            time.sleep(_LONGEST_SLEEP)


def _chunks(reads: Sequence[PartRead]) -> Iterator[tuple[RankWeights, KVRegion, int]]:
    """Yield the rank, remote memory and staging offset of each chunk."""
    for rank, part, offset in reads:
        for start in range(0, part.num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, part.num_bytes - start)
            yield rank, KVRegion(part.address + start, length, rank.device, rank.device_id), offset + start
