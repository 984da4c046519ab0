"""P's leases: promises to keep KV blocks for a decode node. Pure: the clock is passed in, and the caller frees blocks.

                  ┌──extend─┐
    accepted ──announce──► granted ──release, all announced──► released     D has read the blocks, or needs none
       │                    │ └──────release before that─────► aborted
       │                    └────────────expire──────────────► expired      no message from D for too long
       └──release, cancel──► nothing was promised

A lease is granted with the first announced blocks of a prompt, and grows with later ones. Its time runs from the grant
or the latest extension. A broken stream does not end it: D may go on reading over the data network.

D counts from when it sent a request that P has answered, P from when it received that request, which is later. So D has
stopped reading before P frees anything, whatever the delay of messages. Margin and guard cover clock drift. The times
are drawn in docs/leases.md.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass
from enum import StrEnum
from math import inf

_MAX_TERMS = 10  # lengths of a lease by which extensions can move its end beyond the latest announcement


class LeaseState(StrEnum):
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(slots=True)
class _Lease:
    ends: float = inf  # guard included; infinity before the grant
    latest: float = inf  # upper bound of ``ends``
    complete: bool = False  # all blocks of the prompt have been announced

    @property
    def granted(self) -> bool:
        return self.ends < inf


class LeaseTable:
    """All leases of one node in one epoch. Times are seconds of one monotonic clock."""

    def __init__(self, epoch: str, seconds: float, guard: float, remember: int = 65_536) -> None:
        """A repeated release gets the first one's answer until ``remember`` more leases have been numbered."""
        self.epoch = epoch
        self.seconds = seconds
        self.guard = guard
        self._leases: dict[int, _Lease] = {}  # active
        # [lease % remember]: the latest released lease of that remainder, plus one. Its size is constant, while a
        # dictionary would grow for hours.
        self._released = array("Q", bytes(8 * remember))
        self._heap: list[tuple[float, int]] = []  # (end, lease), with stale entries of ended and extended leases
        self.counts = dict.fromkeys(LeaseState, 0)

    def accept(self, lease: int) -> None:
        """Register the lease of a new prompt under a new number. Nothing is promised yet."""
        assert lease not in self._leases, lease
        self._leases[lease] = _Lease()

    def announce(self, lease: int, complete: bool, now: float) -> bool:
        """Promise more blocks; the first ones grant the lease. Return False if it has ended: D must not read them."""
        entry = self._leases.get(lease)
        if entry is None:
            return False
        entry.latest = now + _MAX_TERMS * self.seconds + self.guard
        entry.complete = complete
        if not entry.granted:
            self.counts[LeaseState.GRANTED] += 1
            self._keep_until(lease, entry, now + self.seconds + self.guard)
        return True

    def extend(self, epoch: str, lease: int, now: float) -> float:
        """Extend a lease to its whole length from now; return the seconds that it lasts at least, 0 if it has ended.

        The result shrinks when the latest announcement is long ago, so that no lease lasts forever.
        """
        entry = self._active(epoch, lease)
        if entry is None or not entry.granted:
            return 0.0
        self._keep_until(lease, entry, min(now + self.seconds + self.guard, entry.latest))
        return max(0.0, entry.ends - self.guard - now)

    def release(self, epoch: str, lease: int) -> tuple[bool, bool]:
        """End a lease for D. Return (the lease stood until now, the caller must free its blocks).

        A lease did not stand if it is unknown, had ended, or if not all of its blocks had been announced. A repeated
        release gets the first one's answer.
        """
        entry = self._active(epoch, lease)
        if entry is None:
            return epoch == self.epoch and self._released[lease % len(self._released)] == lease + 1, False
        self._end(lease, LeaseState.RELEASED if entry.complete else LeaseState.ABORTED)
        return entry.complete, True

    def cancel(self, lease: int) -> bool:
        """End the lease of a cancelled prompt if nothing was announced; return whether it ended."""
        entry = self._leases.get(lease)
        if entry is None or entry.granted:
            return False
        self._end(lease, LeaseState.ABORTED)
        return True

    def expire(self, now: float) -> list[int]:
        """End and return all leases whose time and guard have passed; the caller must free their blocks.

        A lease stands until this call, however late it comes.
        """
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            if lease in self._leases and self._leases[lease].ends <= now:
                self._end(lease, LeaseState.EXPIRED)
                expired.append(lease)
        return expired

    def next_expiry(self) -> float | None:
        """Return when a lease ends next; None while no lease is granted."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        """Return the number of granted leases."""
        return sum(entry.granted for entry in self._leases.values())

    def _active(self, epoch: str, lease: int) -> _Lease | None:
        """Return the lease unless it has ended or belongs to another epoch."""
        return self._leases.get(lease) if epoch == self.epoch else None

    def _keep_until(self, lease: int, entry: _Lease, ends: float) -> None:
        if not entry.granted or ends > entry.ends:
            entry.ends = ends
            heapq.heappush(self._heap, (ends, lease))

    def _is_current(self, when: float, lease: int) -> bool:
        return lease in self._leases and self._leases[lease].ends == when

    def _end(self, lease: int, state: LeaseState) -> None:
        if self._leases.pop(lease).granted:
            self.counts[state] += 1
        if state is LeaseState.RELEASED:
            self._released[lease % len(self._released)] = lease + 1
