"""Token buckets for rate limits per minute."""

from __future__ import annotations

_MINUTE = 60.0


class TokenBucket:
    """Holds at most ``per_minute`` and refills at that rate. Callers pass in times: seconds of one monotonic clock.

    The level may fall below zero, because the cost of a request is known only at its end.
    """

    __slots__ = ("_level", "_updated_at", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._updated_at = now

    def level(self, now: float) -> float:
        return min(self.per_minute, self._level + (now - self._updated_at) * self.per_minute / _MINUTE)

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount
        self._updated_at = now

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds ``amount``; an amount beyond its size waits for a full bucket."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * _MINUTE / self.per_minute)

    def resize(self, per_minute: float, now: float) -> None:
        """Change the limit; past usage counts on."""
        used = self.per_minute - self.level(now)
        self.per_minute, self._level, self._updated_at = per_minute, per_minute - used, now
