"""The NIXL connector: public methods only enqueue commands; one owner thread has the agent and executes them.

    step loop ──commands──► owner thread ──► PeerConnection per peer ──► RankConnection per rank ──► NIXL
        ▲                     ▲      │
        └ poll ◄ CompletionQueue ◄───┘       ConnectionProbe: tries new peers, reports to the owner thread

While reads are in flight, the owner thread polls them and sleeps longer each time nothing moved. Otherwise it sleeps
until a command comes.
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
from connector.backends.nixl.rank_connection import TEST_READ_BYTES, TransferContext
from connector.completion_queue import CompletionQueue
from connector.planning.block_slicing import BlockRanges
from connector.planning.rank_mapping import LocalRank
from connector.planning.regions import check_region
from connector.setup import ConnectorSetup
from pdserve.errors import PeerError
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.records import KVConnectorOutput, KVRead, Peer, RankKV

logger = logging.getLogger(__name__)

FIRST_SLEEP = 20e-6  # seconds between polls of reads in flight, doubled each time nothing has moved …
LONGEST_SLEEP = {"cpu": 400e-6, "cuda": 50e-6}  # … up to this, by target device
SLEEP_WHILE_DRAINING = 0.02  # seconds, if only reads from failed peers are left
CLOSE_SECONDS = 1.0


class NixlConnector:
    """Reads blocks of other nodes. ``agent`` is the rank's name in this epoch of its node."""

    def __init__(self, setup: ConnectorSetup) -> None:
        self._name = setup.agent
        self._timing = setup.timing
        self._local_rank = LocalRank(setup.shares, setup.rank, setup.states)
        self._completions = CompletionQueue()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The fields below belong to the owner thread.
        self._context: TransferContext
        self._rank: RankKV
        self._scratch = np.zeros(TEST_READ_BYTES, np.uint8)
        self._probe: ConnectionProbe | None = None
        self._connections: dict[str, PeerConnection] = {}  # by epoch; failed ones until they are drained
        self._probing: set[str] = set()  # epochs
        self._stopping = False

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        """Start the agent; takes about half a second. Raises ConfigError or CapacityError."""
        assert self._thread is None, "register is called once"
        check_region(region, layout.total_bytes, f"{layout.num_blocks} blocks")
        self._completions.on_progress = on_progress
        started: Future[RankKV] = Future()
        self._thread = threading.Thread(target=self._run, args=(region, layout, started), name="kv-nixl", daemon=True)
        self._thread.start()
        return started.result()

    def connect(self, peer: Peer) -> None:
        self._commands.put(partial(self._connect, peer))

    def disconnect(self, epoch: str) -> None:
        self._commands.put(partial(self._disconnect, epoch))

    def read(self, read: KVRead) -> None:
        self._commands.put(partial(self._read, read, time.monotonic()))

    def poll(self) -> KVConnectorOutput:
        if self._failure is not None:
            raise PeerError(f"the KV connector has stopped: {self._failure!r}; restart the node") from self._failure
        return self._completions.drain()

    def close(self) -> None:
        """Stop within about two seconds; transfers in flight have that time to end."""
        if self._thread is not None and self._thread.is_alive():
            self._commands.put(self._stop)
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
        except Exception as error:  # a bug here must not look like a connector that hangs
            logger.exception("the KV connector has stopped")
            self._failure = error
            self._completions.on_progress()

    def _start(self, region: KVRegion, layout: KVLayout) -> None:
        agent = NixlAgent(self._name, self._timing)
        agent.register(region)
        states = self._local_rank.states
        if states is not None:
            agent.register(states.region)
        scratch = KVRegion(self._scratch.ctypes.data, self._scratch.nbytes, "cpu", 0)
        agent.register(scratch)
        prepared = agent.prepare(None, scratch, BlockRanges.whole(TEST_READ_BYTES, 1))
        self._rank = RankKV(self._name, agent.metadata(), region, layout, self._local_rank.share, states)
        self._context = TransferContext(agent, self._rank, prepared, self._timing.stall_timeout)

    def _work(self) -> None:
        sleep = 0.0
        longest_sleep = LONGEST_SLEEP[self._rank.region.device]
        while not self._stopping:
            busy = [connection for connection in self._connections.values() if connection.busy]
            self._run_commands(sleep if busy else None)
            moved = [connection.advance() for connection in self._connections.values()]  # any() would stop at the first
            if any(moved):
                sleep = 0.0
            else:
                longest = SLEEP_WHILE_DRAINING if all(connection.failure for connection in busy) else longest_sleep
                sleep = min(max(2 * sleep, FIRST_SLEEP), longest)
            self._remove_drained()

    def _run_commands(self, timeout: float | None) -> None:
        """Execute all waiting commands. Wait up to ``timeout`` seconds for the first; None waits without limit."""
        try:
            self._commands.get(timeout=timeout)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _connect(self, peer: Peer) -> None:
        connection = self._connections.get(peer.epoch)
        if connection is not None and not connection.failure:
            if connection.ready:  # otherwise it reports itself later
                self._completions.connected(connection.connected)
            return
        try:
            sources = self._local_rank.source_ranks(self._rank.layout, peer)
        except PeerError as error:
            self._completions.peer_failed(peer.epoch, str(error))
            return
        self._probe = self._probe or ConnectionProbe(
            self._name, self._timing, lambda *result: self._commands.put(partial(self._probed, *result))
        )
        self._probing.add(peer.epoch)
        self._probe.probe(peer, sources)

    def _probed(self, peer: Peer, sources: Sources, lanes: Lanes, error: str) -> None:
        if peer.epoch not in self._probing:  # disconnected meanwhile, or reported for an earlier command
            return
        self._probing.discard(peer.epoch)
        try:
            if error:
                raise PeerError(error)
            self._remove_drained(at_once=True)
            agents = {source.rank.agent for source in sources}  # a new epoch of a running node has those of the last
            if any(agents & connection.agents for connection in self._connections.values()):
                raise PeerError("reads from an earlier connection to this peer have not ended yet; try again later")
            self._connections[peer.epoch] = PeerConnection(self._context, self._completions, peer, sources, lanes)
        except PeerError as failure:
            self._completions.peer_failed(peer.epoch, str(failure))
        finally:
            ucx.log().forward()

    def _disconnect(self, epoch: str) -> None:
        self._probing.discard(epoch)
        if epoch in self._connections:
            self._connections[epoch].fail("the connection was given up")

    def _read(self, read: KVRead, ordered_at: float) -> None:
        connection = self._connections.get(read.epoch)
        if connection is None:
            self._completions.read_refused(read, f"no connection to epoch {read.epoch}; connect to it first")
        else:
            connection.submit(read, ordered_at)

    def _remove_drained(self, at_once: bool = False) -> None:
        """Remove failed peers. NIXL holds the GIL for that and may wait for UCX, so not while others are busy."""
        for epoch, connection in list(self._connections.items()):
            quiet = not any(other.busy for other in self._connections.values())
            if connection.drained and (quiet or at_once or time.monotonic() - connection.failed_at > CLOSE_SECONDS):
                del self._connections[epoch]
                connection.close()
                ucx.log().forward()

    def _stop(self) -> None:
        self._stopping = True

    def _finish(self) -> None:
        for connection in self._connections.values():
            connection.fail("the connector was closed")
        self._drain(CLOSE_SECONDS / 2)
        for connection in self._connections.values():
            connection.abort()
        self._drain(CLOSE_SECONDS / 2)
        for connection in self._connections.values():
            connection.close()
        if self._probe is not None:
            self._probe.close(CLOSE_SECONDS)
        self._context.agent.release(self._context.scratch)
        self._context.agent.close()
        ucx.log().forward()

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(connection.busy for connection in self._connections.values()) and time.monotonic() < deadline:
            for connection in self._connections.values():
                connection.advance()
            time.sleep(LONGEST_SLEEP[self._rank.region.device])
