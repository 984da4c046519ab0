"""A connector with one thread, which executes commands and ends reads one after the other."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from connector.completion_queue import CompletionQueue
from pdserve.errors import PeerError
from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.kv.states import RankStates
from pdserve.kv.transports import Connected
from pdserve.records import KVConnectorOutput, KVRead, Peer, RankKV, ReadResult


class SerialConnector(ABC):
    """A back end says what connecting and reading mean. A read ends once it is due and no command is waiting."""

    def __init__(
        self, agent: str, metadata: bytes, share: KVShare | None = None, states: RankStates | None = None
    ) -> None:
        self._agent = agent
        self._metadata = metadata
        self._share = share
        self._states = states
        self._completions = CompletionQueue()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-{agent}", daemon=True)
        self._rank: RankKV  # once registered
        # The fields below belong to the thread.
        self._epochs: set[str] = set()
        self._reads: deque[tuple[KVRead, float]] = deque()  # with the time when they are due

    @abstractmethod
    def _connect_to(self, peer: Peer) -> Connected:
        """Raises PeerError when the peer cannot be connected."""

    @abstractmethod
    def _due_at(self, read: KVRead) -> float:
        """Return when a new read is due, as a time of ``time.monotonic``."""

    @abstractmethod
    def _execute(self, read: KVRead) -> ReadResult:
        """Execute a read that is due. Raises PeerError."""

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        self._completions.on_progress = on_progress
        self._rank = RankKV(self._agent, self._metadata, region, layout, self._share, self._states)
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
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # ------------------------------------------------------------ on the connector's thread

    def _run(self) -> None:
        while True:
            wait = max(0.0, self._reads[0][1] - time.monotonic()) if self._reads else None
            try:
                command = self._commands.get(timeout=wait)
            except queue.Empty:
                self._end(self._reads.popleft()[0])
                continue
            if command is None:
                return
            command()

    def _connect(self, peer: Peer) -> None:
        try:
            connection = self._connect_to(peer)
        except PeerError as error:
            self._completions.peer_failed(peer.epoch, str(error))
            return
        self._epochs.add(peer.epoch)
        self._completions.connected(connection)

    def _disconnect(self, epoch: str) -> None:
        self._epochs.discard(epoch)
        for entry in [entry for entry in self._reads if entry[0].epoch == epoch]:
            self._reads.remove(entry)
            self._completions.read_refused(entry[0], f"the connection to epoch {epoch} was given up")

    def _read(self, read: KVRead) -> None:
        if read.epoch in self._epochs:
            self._reads.append((read, self._due_at(read)))
        else:
            self._completions.read_refused(read, f"no connection to epoch {read.epoch}; connect to it first")

    def _end(self, read: KVRead) -> None:
        try:
            self._completions.read_ended(self._execute(read))
        except PeerError as error:
            self._completions.read_refused(read, str(error))
