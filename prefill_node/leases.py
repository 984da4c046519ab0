"""P's promises to keep blocks. Pure: the clock is passed in, nothing is freed here, only decided. See docs/leases.md.

                  ┌──extend─┐
    accepted ──announce──► granted ──release, all announced──► released     the peer has read them, or wants none
       │                    │ └──────release before that─────► aborted
       │                    └────────────expire──────────────► expired      nothing was heard of the peer for too long
       └──release, hang_up──► nothing was promised

A lease grows: it is granted with the first blocks of a prompt that are announced, and its time runs from then on, until
the peer extends it. Whatever becomes of the call, blocks that were announced are kept until the peer gives them back or
that time has passed: a call that broke says nothing about who still reads.

    P    └ grant ────────── lease ───── guard ──┤ expire: the blocks are free
              ┌ extend ─────────── lease ───── guard ──┤
    D    └ asked for it ─── lease, but for a margin ┤ gives up reading unless extended
           └ asked for it ─── lease, but for a margin ┤

D counts from when it sent what P has answered, P from when it received it, which is later. So D has given up before P
frees anything, however long a message takes; margin and guard are for clocks that do not run alike.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass
from enum import StrEnum
from math import inf

_TERMS = 10  # lengths of a lease for which it can be extended after its latest announcement


class LeaseState(StrEnum):
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(slots=True)
class _Lease:
    ends: float = inf  # infinity while nothing has been announced
    latest: float = inf  # ``ends`` is never moved beyond
    complete: bool = False  # all blocks of the prompt have been announced

    @property
    def granted(self) -> bool:
        return self.ends < inf


class LeaseTable:
    """All leases of one node in one epoch. Times are seconds of one monotonic clock."""

    def __init__(self, epoch: str, seconds: float, guard: float, remember: int = 65_536) -> None:
        """A repeated release is answered as the first one until ``remember`` more numbers have been given out."""
        self.epoch = epoch
        self.seconds = seconds
        self.guard = guard
        self._leases: dict[int, _Lease] = {}  # that have not ended
        # [lease % remember] → the last lease there that was released, plus one. An array is at once as large as it will
        # ever be, where a dictionary would grow for hours.
        self._released = array("Q", bytes(8 * remember))
        self._heap: list[tuple[float, int]] = []  # (when, lease), also of leases that ended or were extended
        self.counts = dict.fromkeys(LeaseState, 0)

    def accept(self, lease: int) -> None:
        """A prompt is to become this lease, whose number must be new. Nothing is promised yet."""
        assert lease not in self._leases, lease
        self._leases[lease] = _Lease()

    def announce(self, lease: int, complete: bool, now: float) -> bool:
        """Promise more blocks: the first ones grant the lease. False if it has ended: the peer must not be told."""
        entry = self._leases.get(lease)
        if entry is None:
            return False
        entry.latest = now + _TERMS * self.seconds + self.guard
        entry.complete = complete
        if not entry.granted:
            self.counts[LeaseState.GRANTED] += 1
            self._keep_until(lease, entry, now + self.seconds + self.guard)
        return True

    def extend(self, epoch: str, lease: int, now: float) -> float:
        """Keep a lease for its whole length once more. Returns for how many seconds it is kept at least, 0 if it ended.

        Less than its length when it was announced too long ago: nothing is kept for ever.
        """
        entry = self._named(epoch, lease)
        if entry is None or not entry.granted:
            return 0.0
        self._keep_until(lease, entry, min(now + self.seconds + self.guard, entry.latest))
        return max(0.0, entry.ends - self.guard - now)

    def release(self, epoch: str, lease: int) -> tuple[bool, bool]:
        """End a lease at the peer's wish. Returns (what was promised has been kept, its blocks are to be freed now).

        A repeated release says again what the first one said. A lease has not been kept if it is unknown, has ended
        before, or if not all of its blocks had been announced.
        """
        entry = self._named(epoch, lease)
        if entry is None:
            return epoch == self.epoch and self._released[lease % len(self._released)] == lease + 1, False
        self._end(lease, LeaseState.RELEASED if entry.complete else LeaseState.ABORTED)
        return entry.complete, True

    def hang_up(self, lease: int) -> bool:
        """The peer's call has ended. Returns whether the lease has, too: only as long as nothing was announced."""
        entry = self._leases.get(lease)
        if entry is None or entry.granted:
            return False
        self._end(lease, LeaseState.ABORTED)
        return True

    def expire(self, now: float) -> list[int]:
        """End all leases whose time and guard have passed by ``now``; their blocks are to be freed.

        Until then they stand, however late this is called.
        """
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            if lease in self._leases and self._leases[lease].ends <= now:
                self._end(lease, LeaseState.EXPIRED)
                expired.append(lease)
        return expired

    def next_expiry(self) -> float | None:
        """When ``expire`` will next have something to do; None while no lease's time runs."""
        while self._heap and not self._is_current(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        """How many are granted and have not ended."""
        return sum(entry.granted for entry in self._leases.values())

    def _named(self, epoch: str, lease: int) -> _Lease | None:
        """The lease that a peer means, unless it has ended, be it with an earlier life of this node."""
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
