"""The connector of simulated nodes: reads end after the time that their cost model says, and move nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from connector.completion_queue import CompletionQueue
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.kv import KVLayout
from pdserve.records import KVConnectorOutput, KVRead, KVRegion, Peer, RankKV, ReadResult
from pdserve.transports import UNKNOWN, Connected


class _TimedRead(NamedTuple):
    read: KVRead
    seconds: float
    ends_at: float  # of time.monotonic


class SimulatedConnector:
    """Reads one after the other, from all peers; a peer's sending rate is not limited.

    It cannot see a dead peer and connects to all. The frontend notices the broken stream to the peer, disconnects, and
    uses no KV without a lease that stood.
    """

    def __init__(self, agent: str, costs: SimulatedCosts) -> None:
        self._agent = agent
        self._costs = costs
        self._completions = CompletionQueue()
        self._layout: KVLayout | None = None
        self._changed = threading.Condition()  # guards the fields below
        self._epochs: set[str] = set()
        self._reads: deque[_TimedRead] = deque()  # by time of their end
        self._busy_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv-{agent}", daemon=True)

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        self._completions.on_progress = on_progress
        self._layout = layout
        self._thread.start()
        return RankKV(self._agent, b"simulated", region, layout)

    def connect(self, peer: Peer) -> None:
        with self._changed:
            self._epochs.add(peer.epoch)
        self._completions.connected(Connected(peer.epoch, UNKNOWN, "simulated"))

    def disconnect(self, epoch: str) -> None:
        with self._changed:
            self._epochs.discard(epoch)
            cancelled = [timed.read for timed in self._reads if timed.read.epoch == epoch]
            self._reads = deque(timed for timed in self._reads if timed.read.epoch != epoch)
        for read in cancelled:
            self._completions.read_refused(read, f"the connection to epoch {epoch} was given up")

    def read(self, read: KVRead) -> None:
        assert self._layout is not None
        with self._changed:
            is_connected = read.epoch in self._epochs
            if is_connected:
                seconds = self._costs.of_read(len(read.local_blocks) * self._layout.block_size)
                self._busy_until = max(self._busy_until, time.monotonic()) + seconds
                self._reads.append(_TimedRead(read, seconds, self._busy_until))
                self._changed.notify()
        if not is_connected:
            self._completions.read_refused(read, f"no connection to epoch {read.epoch}; connect to it first")

    def poll(self) -> KVConnectorOutput:
        return self._completions.drain()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._layout is not None
        while (timed := self._next_ended()) is not None:
            num_blocks = len(timed.read.local_blocks)
            num_bytes = num_blocks * self._layout.block_bytes
            self._completions.read_ended(ReadResult(timed.read.read_id, "", num_bytes, num_blocks, timed.seconds))

    def _next_ended(self) -> _TimedRead | None:
        """Wait for the end of a read; return None when the connector is closed."""
        with self._changed:
            while not self._closed:
                wait = self._reads[0].ends_at - time.monotonic() if self._reads else None
                if wait is not None and wait <= 0.0:
                    return self._reads.popleft()
                self._changed.wait(wait)
        return None
