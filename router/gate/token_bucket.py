"""Token buckets: so much per minute, and a minute's worth at once after a pause."""

from __future__ import annotations

_MINUTE = 60.0


class TokenBucket:
    """Holds at most ``per_minute`` and fills at that rate. Times are seconds of one clock that never goes back.

    The level may fall below zero: what a request will cost is known only at its end, and who has overdrawn waits.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = now

    def level(self, now: float) -> float:
        return min(self.per_minute, self._level + (now - self._at) * self.per_minute / _MINUTE)

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount
        self._at = now

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` is there; 0 when it is. More than fits into the bucket waits for a full one."""
        lacking = min(amount, self.per_minute) - self.level(now)
        return max(0.0, lacking * _MINUTE / self.per_minute)

    def resize(self, per_minute: float, now: float) -> None:
        """Another limit from now on; what was used of the old one stays used."""
        used = self.per_minute - self.level(now)
        self.per_minute, self._level, self._at = per_minute, per_minute - used, now
