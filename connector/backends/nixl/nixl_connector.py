"""The NIXL connector: public methods only enqueue, one thread owns the agent and does everything else.

    step loop ──orders──► owner thread ──► Connection per peer ──► Link per rank of it ──► NIXL
        ▲                  ▲      │
        └── poll ◄─ Outbox ◄──────┘        Scout: tries new peers, reports to the owner thread

While reads are in flight the owner thread polls them, sleeping a little longer each time nothing moved; otherwise it
sleeps until an order comes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.connection_probe import ConnectionProbe, Lanes, Sources
from connector.backends.nixl.peer_connection import PeerConnection
from connector.backends.nixl.rank_link import GREETING_BYTES, Home
from connector.completion_queue import CompletionQueue
from connector.planning.block_slicing import BlockRanges
from connector.planning.rank_mapping import SINGLE_RANK, LocalRank, check_region
from pdserve.errors import PeerError
from pdserve.kv import KVLayout
from pdserve.records import KVConnectorOutput, KVRead, KVRegion, Peer, RankKV
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

logger = logging.getLogger(__name__)

FIRST_SLEEP = 20e-6  # seconds between polls of reads in flight, twice as long each time nothing has moved …
LONGEST_SLEEP = {"cpu": 400e-6, "cuda": 50e-6}  # … up to this, by the device that is read into
SLEEP_WHILE_DRAINING = 0.02  # seconds, when all that is left are reads from lost peers
CLOSE_SECONDS = 1.0


class NixlConnector:
    """Reads blocks of other nodes into ours.

    ``agent`` names this life of this rank: peers tell lives apart by it. ``own`` says what of the model it holds.
    """

    def __init__(self, agent: str, timing: PeerTiming = DEFAULT_TIMING, rank: LocalRank = SINGLE_RANK) -> None:
        self._name = agent
        self._timing = timing
        self._local_rank = rank
        self._outbox = CompletionQueue()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The rest belongs to the owner thread.
        self._agent: NixlAgent
        self._home: Home
        self._rank: RankKV
        self._scratch = np.zeros(GREETING_BYTES, np.uint8)
        self._scout: ConnectionProbe | None = None
        self._connections: dict[str, PeerConnection] = {}  # by epoch; also lost ones that are not drained yet
        self._visiting: set[str] = set()  # epochs
        self._stopping = False

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        """Start the agent; takes about half a second. Raises ConfigError or CapacityError."""
        assert self._thread is None, "register is called once"
        check_region(region, layout)
        self._outbox.on_progress = on_progress
        started: Future[RankKV] = Future()
        self._thread = threading.Thread(target=self._run, args=(region, layout, started), name="kv-nixl", daemon=True)
        self._thread.start()
        return started.result()

    def connect(self, peer: Peer) -> None:
        self._orders.put(partial(self._connect, peer))

    def disconnect(self, epoch: str) -> None:
        self._orders.put(partial(self._disconnect, epoch))

    def read(self, read: KVRead) -> None:
        self._orders.put(partial(self._read, read, time.monotonic()))

    def poll(self) -> KVConnectorOutput:
        if self._failure is not None:
            raise PeerError(f"the KV connector has stopped: {self._failure!r}; restart the node") from self._failure
        return self._outbox.drain()

    def close(self) -> None:
        """Stop within about two seconds; what is in flight is given that long to end."""
        if self._thread is not None and self._thread.is_alive():
            self._orders.put(self._stop)
            self._thread.join()

    # ------------------------------------------------------------ on the owner thread

    def _run(self, region: KVRegion, layout: KVLayout, started: Future[RankKV]) -> None:
        try:
            self._start(region, layout)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(self._rank)
        try:
            self._work()
            self._finish()
        except Exception as error:  # ours to fix; a connector that hangs would hide it
            logger.exception("the KV connector has stopped")
            self._failure = error
            self._outbox.on_progress()

    def _start(self, region: KVRegion, layout: KVLayout) -> None:
        self._agent = NixlAgent(self._name, self._timing)
        self._agent.register(region)
        scratch = KVRegion(self._scratch.ctypes.data, self._scratch.nbytes, "cpu", 0)
        self._agent.register(scratch)
        self._home = Home(
            self._agent,
            region,
            self._agent.prepare(None, scratch, BlockRanges.whole(GREETING_BYTES, 1)),
            self._timing.stall_timeout,
        )
        self._rank = RankKV(self._name, self._agent.metadata(), region, layout, self._local_rank.share)

    def _work(self) -> None:
        sleep, longest_sleep = 0.0, LONGEST_SLEEP[self._home.region.device]
        while not self._stopping:
            busy = [connection for connection in self._connections.values() if connection.busy]
            self._take_orders(sleep if busy else None)
            moved = [connection.advance() for connection in self._connections.values()]  # all, so no any(…) around it
            if True in moved:
                sleep = 0.0
            else:
                longest = SLEEP_WHILE_DRAINING if all(connection.lost for connection in busy) else longest_sleep
                sleep = min(max(2 * sleep, FIRST_SLEEP), longest)
            self._forget_drained()

    def _take_orders(self, timeout: float | None) -> None:
        """Carry out all orders there are; wait for the first, without limit where ``timeout`` is None."""
        try:
            self._orders.get(timeout=timeout)()
            while True:
                self._orders.get_nowait()()
        except queue.Empty:
            return

    def _connect(self, peer: Peer) -> None:
        connection = self._connections.get(peer.epoch)
        if connection is not None and not connection.lost:
            if connection.ready:  # else it is answered as soon as it is
                self._outbox.connected(connection.connected)
            return
        try:
            sources = self._local_rank.source_ranks(self._rank.layout, peer)
        except PeerError as error:
            self._outbox.failed(peer.epoch, str(error))
            return
        self._scout = self._scout or ConnectionProbe(
            self._name, self._timing, lambda *found: self._orders.put(partial(self._visited, *found))
        )
        self._visiting.add(peer.epoch)
        self._scout.visit(peer, sources)

    def _visited(self, peer: Peer, sources: Sources, lanes: Lanes, error: str) -> None:
        if peer.epoch not in self._visiting:  # disconnected meanwhile, or reported for an earlier order
            return
        self._visiting.discard(peer.epoch)
        try:
            if error:
                raise PeerError(error)
            self._forget_drained(at_once=True)
            if peer.epoch in self._connections:
                raise PeerError("reads from an earlier connection to this peer have not ended yet; try again later")
            self._connections[peer.epoch] = PeerConnection(self._home, self._outbox, peer, sources, lanes)
        except PeerError as failure:
            self._outbox.failed(peer.epoch, str(failure))
        finally:
            ucx.log().pass_on()

    def _disconnect(self, epoch: str) -> None:
        self._visiting.discard(epoch)
        if epoch in self._connections:
            self._connections[epoch].give_up("the connection was given up")

    def _read(self, read: KVRead, ordered_at: float) -> None:
        connection = self._connections.get(read.epoch)
        if connection is None:
            self._outbox.refused(read, f"no connection to epoch {read.epoch}; connect to it first")
        else:
            connection.submit(read, ordered_at)

    def _forget_drained(self, at_once: bool = False) -> None:
        """Remove lost peers. NIXL holds the GIL for that and may wait for UCX, so not while others are busy."""
        for epoch, connection in list(self._connections.items()):
            quiet = not any(other.busy for other in self._connections.values())
            if connection.drained and (quiet or at_once or time.monotonic() - connection.lost_at > CLOSE_SECONDS):
                del self._connections[epoch]
                connection.close()
                ucx.log().pass_on()

    def _stop(self) -> None:
        self._stopping = True

    def _finish(self) -> None:
        for connection in self._connections.values():
            connection.give_up("the connector was closed")
        self._drain(CLOSE_SECONDS / 2)
        for connection in self._connections.values():
            connection.abandon()
        self._drain(CLOSE_SECONDS / 2)
        for connection in self._connections.values():
            connection.close()
        if self._scout is not None:
            self._scout.close(CLOSE_SECONDS)
        self._agent.release(self._home.scratch)
        self._agent.close()
        ucx.log().pass_on()

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(connection.busy for connection in self._connections.values()) and time.monotonic() < deadline:
            for connection in self._connections.values():
                connection.advance()
            time.sleep(LONGEST_SLEEP[self._home.region.device])
