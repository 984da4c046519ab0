"""P's leases: promises to keep KV blocks for a decode node. Pure: the clock is passed in, and the caller frees blocks.

                  ┌──extend─┐
    accepted ──announce──► granted ──release, all announced──► released     D has read the blocks, or needs none
       │                    │ └──────release before that─────► aborted
       │                    ├────────────expire──────────────► expired      no message from D for too long
       │                    └────────────revoke──────────────► revoked      a pull, and P needs the blocks itself
       └──release, cancel, revoke──► nothing was promised

A lease belongs to the stream that its prompt came on: its id begins with P's number of that stream, and messages hold
only the rest. So no stream can name the lease of another one.

A lease is granted with the first announced blocks of a prompt, and grows with later ones. Its time runs from the grant
or the latest extension. A broken stream does not end it: D may go on reading over the data network.

D counts from when it sent a request that P has answered, P from when it received that request, which is later. So D has
stopped reading before P frees anything, however long messages take. Margin and guard cover clock drift. The times
are drawn in docs/leases.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Generic, NamedTuple, TypeVar

_MAX_TERMS = 10  # lengths of a lease by which extensions can move its end beyond the latest announcement


class LeaseId(NamedTuple):
    stream: int  # P's number of the stream, never reused
    request: int  # D's number of the prompt on that stream


class LeaseState(StrEnum):
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"
    REVOKED = "revoked"


@dataclass(slots=True, eq=False)
class Lease:
    """One lease, with the prompt that it belongs to in a subclass (node/leasing/prompts.py)."""

    id: LeaseId
    ends: float = inf  # guard included; infinity before the grant
    latest: float = inf  # upper bound of ``ends``
    complete: bool = False  # all blocks of the prompt have been announced

    @property
    def granted(self) -> bool:
        return self.ends < inf


L = TypeVar("L", bound=Lease)


class LeaseTable(Generic[L]):
    """All leases of one node that have not ended. Times are seconds of one monotonic clock."""

    def __init__(self, seconds: float, guard: float) -> None:
        self.seconds = seconds
        self.guard = guard
        self._leases: dict[LeaseId, L] = {}
        self._heap: list[tuple[float, LeaseId]] = []  # (end, lease), with stale entries of ended and extended leases
        self.counts = dict.fromkeys(LeaseState, 0)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[L]:
        """Iterate over a copy: leases may end meanwhile."""
        return iter(tuple(self._leases.values()))

    def get(self, lease: LeaseId) -> L | None:
        """Return a lease that has been accepted and has not ended."""
        return self._leases.get(lease)

    def accept(self, lease: L) -> None:
        """Register the lease of a new prompt. Nothing is promised yet."""
        assert lease.id not in self._leases, lease.id
        self._leases[lease.id] = lease

    def announce(self, lease: LeaseId, complete: bool, now: float) -> bool:
        """Promise more blocks; the first ones grant the lease. Return False if it has ended: D must not read them."""
        entry = self._leases.get(lease)
        if entry is None:
            return False
        entry.latest = now + _MAX_TERMS * self.seconds + self.guard
        entry.complete = complete
        if not entry.granted:
            self.counts[LeaseState.GRANTED] += 1
            self._keep_until(entry, now + self.seconds + self.guard)
        return True

    def extend(self, lease: LeaseId, now: float) -> float:
        """Extend a lease to its whole length from now; return the seconds that it lasts at least, 0 if it has ended.

        The result shrinks when the latest announcement is long ago, so that no lease lasts forever.
        """
        entry = self._leases.get(lease)
        if entry is None or not entry.granted:
            return 0.0
        self._keep_until(entry, min(now + self.seconds + self.guard, entry.latest))
        return max(0.0, entry.ends - self.guard - now)

    def release(self, lease: LeaseId) -> tuple[bool, bool]:
        """End a lease for D. Return (the lease stood until now, the caller must free its blocks).

        A lease did not stand if it is unknown, had ended, or if not all of its blocks had been announced.
        """
        entry = self._leases.get(lease)
        if entry is None:
            return False, False
        self._end(entry, LeaseState.RELEASED if entry.complete else LeaseState.ABORTED)
        return entry.complete, True

    def cancel(self, lease: LeaseId) -> bool:
        """End the lease of a cancelled prompt if nothing was announced; return whether it ended."""
        entry = self._leases.get(lease)
        if entry is None or entry.granted:
            return False
        self._end(entry, LeaseState.ABORTED)
        return True

    def revoke(self, lease: LeaseId) -> bool:
        """End a lease because its blocks are needed here; return whether the caller must free them."""
        entry = self._leases.get(lease)
        if entry is not None:
            self._end(entry, LeaseState.REVOKED)
        return entry is not None

    def expire(self, now: float) -> list[L]:
        """End and return all leases whose time and guard have passed; the caller must free their blocks.

        A lease stands until this call, however late it comes.
        """
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            entry = self._leases.get(lease)
            if entry is not None and entry.ends <= now:
                self._end(entry, LeaseState.EXPIRED)
                expired.append(entry)
        return expired

    def next_expiry(self) -> float | None:
        """Return when a lease ends next; None while no lease is granted."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _keep_until(self, entry: L, ends: float) -> None:
        if not entry.granted or ends > entry.ends:
            entry.ends = ends
            heapq.heappush(self._heap, (ends, entry.id))

    def _is_current(self, when: float, lease: LeaseId) -> bool:
        return lease in self._leases and self._leases[lease].ends == when

    def _end(self, entry: L, state: LeaseState) -> None:
        del self._leases[entry.id]
        if entry.granted:
            self.counts[state] += 1
