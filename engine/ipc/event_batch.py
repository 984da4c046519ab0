"""Collects what one turn of the step loop has to tell the front."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from engine.ipc.messages import Batch, Leased, Output, ReadEnded, Refused, Reserved, Scored, Status
from pdserve.transports import Connected


@dataclass(slots=True)
class EventBatch:
    """Filled by the scheduler during a turn, then sent as one message."""

    scored: list[Scored] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    reads: list[ReadEnded] = field(default_factory=list)
    leased: list[Leased] = field(default_factory=list)
    connected: list[Connected] = field(default_factory=list)
    failed_peers: list[tuple[str, str]] = field(default_factory=list)
    status_changed: bool = False  # blocks came or went, though nobody has to be told of a request

    def __bool__(self) -> bool:
        return bool(
            self.outputs
            or self.scored
            or self.reserved
            or self.refused
            or self.reads
            or self.leased
            or self.connected
            or self.failed_peers
            or self.status_changed
        )

    def refuse(self, rid: int, kind: str, text: str) -> None:
        self.refused.append(Refused(rid, kind, text))

    def take(self, status: Status, cached: Collection[bytes], evicted: Collection[bytes]) -> Batch:
        """All of it as one message, with what has changed in the cache; the report is empty afterwards."""
        batch = Batch(
            status=status,
            scored=tuple(self.scored),
            outputs=tuple(self.outputs),
            reserved=tuple(self.reserved),
            refused=tuple(self.refused),
            reads=tuple(self.reads),
            leased=tuple(self.leased),
            connected=tuple(self.connected),
            failed_peers=tuple(self.failed_peers),
            cached=tuple(cached),
            evicted=tuple(evicted),
        )
        entries: list[Any]
        for entries in (
            *(self.scored, self.outputs, self.reserved, self.refused, self.reads),
            *(self.leased, self.connected, self.failed_peers),
        ):
            entries.clear()
        self.status_changed = False
        return batch
