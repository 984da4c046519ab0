"""Turns at a few workers, so that long jobs of one client never occupy all of them. Pure; wrappers add the waiting."""

from __future__ import annotations

from collections import Counter
from typing import Generic

from pdserve.fairness.fair_queue import ClientT, FairQueue, T

_QUANTUM = 1000  # microseconds of work, see FairQueue


class FairTurns(Generic[ClientT, T]):
    """Waiting jobs, fair between clients by the time that their jobs take.

    A client occupies at most all workers but one, or the only one.
    """

    def __init__(self, workers: int) -> None:
        self._free = workers
        self._most = max(1, workers - 1)
        self._busy = Counter[ClientT]()  # workers
        self._queue = FairQueue[ClientT, tuple[ClientT, T]](_QUANTUM)

    def push(self, client: ClientT, job: T) -> None:
        self._queue.push((client, job), client, 0)

    def remove(self, client: ClientT, job: T) -> None:
        """Raises ValueError if the job does not wait."""
        self._queue.remove((client, job), client, 0)

    def begin(self) -> tuple[ClientT, T] | None:
        """Take the next job for a free worker; None if no job may begin now. ``end`` must follow."""
        turn = self._queue.first(lambda client: self._busy[client] < self._most) if self._free else None
        if turn is not None:
            client, _ = turn
            self._queue.take(turn, client, 0, 0)
            self._free -= 1
            self._busy[client] += 1
        return turn

    def end(self, client: ClientT, seconds: float) -> None:
        """End a job, which has occupied its worker for ``seconds``."""
        self._free += 1
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        self._queue.charge(client, round(seconds * 1e6))
