"""Counters of the reads over one connection."""

from __future__ import annotations

import time


class TransferStats:
    """``seconds`` counts the time with at least one read under way, so bytes / seconds is the rate of the network."""

    def __init__(self) -> None:
        self.num_reads = 0  # ended reads, failed ones included
        self.num_failed = 0
        self.num_bytes = 0
        self.num_descriptors = 0
        self.seconds = 0.0
        self._num_under_way = 0
        self._counted_until = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_reads} reads ({self.num_failed} failed), {self.num_bytes} B in {self.num_descriptors} "
            f"descriptors, {self.seconds:.3f} s, {self.rate:.2f} GB/s"
        )

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9

    def begin(self, ordered_at: float) -> None:
        """Count a read that was ordered at ``ordered_at`` of the monotonic clock."""
        if not self._num_under_way:
            self._counted_until = max(ordered_at, self._counted_until)
        self._num_under_way += 1

    def end(self, num_bytes: int, num_descriptors: int, failed: bool) -> float:
        """Count the end of a read. Return the seconds with reads under way since the last end."""
        now = time.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        self._num_under_way -= 1
        self.num_reads += 1
        self.num_failed += failed
        self.num_bytes += num_bytes
        self.num_descriptors += num_descriptors
        self.seconds += seconds
        return seconds
