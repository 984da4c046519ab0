"""Collects what one turn of the step loop has to tell the front, and counts since start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.blocks import BlockPool, Use
from engine.messages import Batch, Leased, Output, ReadEnded, Refused, Reserved, Status
from pdserve.transports import Connected


@dataclass(slots=True)
class Report:
    """Filled by the scheduler during a turn, then sent as one message."""

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
            or self.reserved
            or self.refused
            or self.reads
            or self.leased
            or self.connected
            or self.failed_peers
            or self.status_changed
        )

    def take(self, status: Status) -> Batch:
        """All of it as one message; the report is empty afterwards."""
        batch = Batch(
            status=status,
            outputs=tuple(self.outputs),
            reserved=tuple(self.reserved),
            refused=tuple(self.refused),
            reads=tuple(self.reads),
            leased=tuple(self.leased),
            connected=tuple(self.connected),
            failed_peers=tuple(self.failed_peers),
        )
        entries: list[Any]
        for entries in (
            *(self.outputs, self.reserved, self.refused, self.reads),
            *(self.leased, self.connected, self.failed_peers),
        ):
            entries.clear()
        self.status_changed = False
        return batch


@dataclass(slots=True)
class Totals:
    """Since the engine started."""

    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    host_seconds: float = 0.0  # of the step loop, without waiting for results

    def status(self, pool: BlockPool, *, waiting: int, reading: int, running: int) -> Status:
        """Together with what there is at present."""
        return Status(
            free=pool.count(Use.FREE),
            held=pool.count(Use.HELD),
            leased=pool.count(Use.LEASED),
            quarantined=pool.count(Use.QUARANTINED),
            total=pool.total,
            waiting=waiting,
            reading=reading,
            running=running,
            steps=self.steps,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            host_seconds=self.host_seconds,
        )
