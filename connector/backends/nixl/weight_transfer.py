"""Weights between nodes: a source that registers tensors, and a reader that a starting node uses while it loads.

The source does nothing after its start: NIXL's progress thread answers reads, or none where the network reads memory
by itself. A reader works on the threads that load the model, one at a time, and waits for each tensor.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transfers import Transfers
from connector.planning.block_slicing import BlockRanges
from pdserve.errors import PeerError, shown
from pdserve.kv.layout import KVRegion
from pdserve.rpc.timeouts import PeerTiming
from pdserve.weights.sharing import OfferedMemory, PartRead, RankWeights, WeightPeer

_CHUNK_BYTES = 64 << 20
_IN_FLIGHT = 4  # chunks
_FIRST_SLEEP = 20e-6  # seconds between polls
_LONGEST_SLEEP = 400e-6  # seconds
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


class NixlWeightReader:
    """Implements pdserve.protocols.WeightReader. After an error the staging memory must not be used again."""

    def __init__(self, peer: WeightPeer, timing: PeerTiming) -> None:
        self.peer = peer
        self._timing = timing
        self._agent: NixlAgent | None = None
        self._staging: KVRegion
        self._ranks: dict[str, Transfers] = {}  # by agent
        self._failure = ""
        # Seconds that reads may take beside those at the slowest rate; a hang is found after one stall timeout.
        self._longest_delay = self._budget = 1.5 * timing.stall_timeout

    def open(self, staging: KVRegion) -> None:
        self._agent = NixlAgent(f"weight-reader-{secrets.token_hex(8)}", self._timing)
        self._agent.register(staging)
        self._staging = staging

    def read(self, reads: Sequence[PartRead]) -> None:
        for rank, _, _ in reads:  # its time does not count
            self._connect(rank)
        started = time.monotonic()
        self._budget = min(self._budget, self._longest_delay) + sum(p.num_bytes for _, p, _ in reads) / _SLOWEST
        try:
            waiting = deque(_chunks(reads))
            sleep = 0.0
            while waiting or self._num_in_flight:
                moved = self._poll()
                if waiting and self._num_in_flight < _IN_FLIGHT:
                    self._post(*waiting.popleft())
                    moved = True
                if self._failure:
                    raise PeerError(self._failure)
                if moved:
                    sleep = 0.0
                    continue
                if time.monotonic() - started > self._budget:
                    raise PeerError(f"it sends less than {_SLOWEST >> 20} MiB/s")
                sleep = min(max(2 * sleep, _FIRST_SLEEP), _LONGEST_SLEEP)
                time.sleep(sleep)
        except PeerError as exc:
            self._abort(str(exc))
            raise
        finally:
            self._budget -= time.monotonic() - started
            ucx.log().forward()

    def close(self) -> None:
        """Close all connections. Leave the agent alone while bytes may still arrive. Idempotent."""
        if self._agent is None or self._num_in_flight:
            return
        with suppress(PeerError):  # a broken connection is closed
            for agent in self._ranks:
                self._agent.remove(agent)
            self._agent.close()
        self._ranks.clear()
        self._agent = None
        ucx.log().forward()

    @property
    def drained(self) -> bool:
        """Whether no byte can reach the staging memory any more."""
        return not self._num_in_flight

    @property
    def _num_in_flight(self) -> int:
        return sum(map(len, self._ranks.values()))

    def _connect(self, rank: RankWeights) -> None:
        assert self._agent is not None, "open comes first"
        if rank.agent in self._ranks:
            return
        transfers = Transfers(
            self._agent, rank.agent, rank.metadata, stall_timeout=self._timing.stall_timeout, failed=self._failed
        )
        agent = self._agent.add(rank.metadata)
        if agent != rank.agent:
            self._agent.remove(agent)
            raise PeerError(f"the peer says it is {shown(rank.agent)}, its NIXL metadata is of {shown(agent)}")
        self._ranks[rank.agent] = transfers

    def _failed(self, reason: str) -> None:
        self._failure = self._failure or reason

    def _post(self, rank: RankWeights, remote: KVRegion, offset: int) -> None:
        agent = self._agent
        assert agent is not None
        here = KVRegion(self._staging.address + offset, remote.num_bytes, self._staging.device, self._staging.device_id)
        whole = BlockRanges.whole(remote.num_bytes, 1)
        local = agent.prepare(None, here, whole)
        there = agent.prepare(rank.agent, remote, whole)

        def release(error: str) -> None:
            agent.release(local)
            agent.release(there)

        self._ranks[rank.agent].post(lambda: agent.read(local, _ONLY, there, _ONLY), release)

    def _poll(self) -> bool:
        """Poll the transfers in flight. Return whether one has ended."""
        return sum(transfers.poll() for transfers in self._ranks.values()) > 0

    def _abort(self, reason: str) -> None:
        """Make the transfers in flight end, by shutting the sockets to the peer."""
        for transfers in self._ranks.values():
            transfers.fail(reason)
            transfers.shut_sockets()
        end = time.monotonic() + _END_SECONDS
        while self._num_in_flight and time.monotonic() < end:
            self._poll()
            time.sleep(_LONGEST_SLEEP)


def _chunks(reads: Sequence[PartRead]) -> Iterator[tuple[RankWeights, KVRegion, int]]:
    """Yield the rank, remote memory and staging offset of each chunk."""
    for rank, part, offset in reads:
        for start in range(0, part.num_bytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, part.num_bytes - start)
            yield rank, KVRegion(part.address + start, length, rank.device, rank.device_id), offset + start
