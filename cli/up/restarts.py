"""Delays before a dead process starts again. Pure: times are in monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass

MAX_FAILURES = 5  # failures in a row
FIRST_DELAY = 0.5  # seconds; doubles with each failure in a row
STABLE = 60.0  # seconds of service after which earlier failures do not count


@dataclass
class Restarts:
    """The failures of one process."""

    failures: int = 0  # failures in a row
    due: float = 0.0  # time from which it may start again

    def died(self, now: float, served: float) -> bool:
        """Record a death after ``served`` seconds of service. Return False if the process has failed too often."""
        self.failures = 1 if served >= STABLE else self.failures + 1
        self.due = now + self.delay
        return self.failures < MAX_FAILURES

    @property
    def delay(self) -> float:
        return FIRST_DELAY * float(2 ** (self.failures - 1))
