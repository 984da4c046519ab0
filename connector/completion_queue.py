"""What a connector has to tell, from the thread where it happened to the step loop that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdserve.records import EMPTY_CONNECTOR_OUTPUT, KVConnectorOutput, KVRead, ReadResult
from pdserve.transports import Connected


class CompletionQueue:
    """Filled from any thread, drained by ``poll``. Every entry is followed by a call of ``on_progress``."""

    def __init__(self) -> None:
        self.on_progress: Callable[[], None] = _nobody_listens
        self._lock = threading.Lock()
        self._results: list[ReadResult] = []
        self._connected: list[Connected] = []
        self._failed: list[tuple[str, str]] = []

    def ended(self, result: ReadResult) -> None:
        """A read has ended and no byte of it can land any more."""
        with self._lock:
            self._results.append(result)
        self.on_progress()

    def refused(self, read: KVRead, reason: str) -> None:
        """A read that was never begun; its local blocks hold nothing of use."""
        self.ended(ReadResult(read.read_id, error=reason))

    def connected(self, connection: Connected) -> None:
        with self._lock:
            self._connected.append(connection)
        self.on_progress()

    def failed(self, epoch: str, reason: str) -> None:
        with self._lock:
            self._failed.append((epoch, reason))
        self.on_progress()

    def drain(self) -> KVConnectorOutput:
        """Everything since the last call."""
        with self._lock:
            if not (self._results or self._connected or self._failed):
                return EMPTY_CONNECTOR_OUTPUT
            output = KVConnectorOutput(tuple(self._results), tuple(self._connected), tuple(self._failed))
            self._results, self._connected, self._failed = [], [], []
            return output


def _nobody_listens() -> None:
    """Stands in until a connector is registered."""
