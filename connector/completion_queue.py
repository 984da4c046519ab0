"""Events of a connector, on their way from the connector's threads to the step loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdserve.kv.transports import Connected
from pdserve.records import EMPTY_CONNECTOR_OUTPUT, KVConnectorOutput, KVRead, ReadResult


class CompletionQueue:
    """Filled from any thread, drained by ``poll``. Each event is followed by a call of ``on_progress``."""

    def __init__(self) -> None:
        self.on_progress: Callable[[], None] = lambda: None  # until the connector is registered
        self._lock = threading.Lock()
        self._results: list[ReadResult] = []
        self._connected: list[Connected] = []
        self._failed: list[tuple[str, str]] = []

    def read_ended(self, result: ReadResult) -> None:
        """A read has ended and no more of its bytes can land."""
        with self._lock:
            self._results.append(result)
        self.on_progress()

    def read_refused(self, read: KVRead, reason: str) -> None:
        """Report a read that ended before it began, or whose bytes are not used."""
        self.read_ended(ReadResult(read.read_id, error=reason))

    def connected(self, connection: Connected) -> None:
        with self._lock:
            self._connected.append(connection)
        self.on_progress()

    def peer_failed(self, epoch: str, reason: str) -> None:
        with self._lock:
            self._failed.append((epoch, reason))
        self.on_progress()

    def drain(self) -> KVConnectorOutput:
        with self._lock:
            if not (self._results or self._connected or self._failed):
                return EMPTY_CONNECTOR_OUTPUT
            output = KVConnectorOutput(tuple(self._results), tuple(self._connected), tuple(self._failed))
            self._results = []
            self._connected = []
            self._failed = []
            return output
