"""What has been read over one connection."""

from __future__ import annotations

import time


class LinkTraffic:
    """``seconds`` counts the time during which at least one read was under way, so bytes per second are the wire's."""

    def __init__(self) -> None:
        self.num_reads = 0  # that have ended, failed ones included
        self.num_failed = 0
        self.num_bytes = 0
        self.num_descriptors = 0
        self.seconds = 0.0
        self._num_under_way = 0
        self._since = 0.0

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
        """A read was ordered at that time of the monotonic clock."""
        if not self._num_under_way:
            self._since = max(ordered_at, self._since)
        self._num_under_way += 1

    def end(self, num_bytes: int, num_descriptors: int, failed: bool) -> float:
        """A read has ended. Returns the seconds since the last one did, as far as reads were under way."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._num_under_way -= 1
        self.num_reads += 1
        self.num_failed += failed
        self.num_bytes += num_bytes
        self.num_descriptors += num_descriptors
        self.seconds += seconds
        return seconds
