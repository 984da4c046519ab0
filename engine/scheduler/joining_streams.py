"""When streams join the decodes of a node after a handoff: how long some have waited, and when the next one comes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from engine.kv_cache.peer_kv import PeerKV
from engine.scheduler.itl_target import OVERDUE
from engine.scheduler.microbatch import RunnableSequences


class JoiningStreams:
    """Times are of the scheduler's ``clock``. ``busy``: seconds until the device can begin the planned step."""

    def __init__(self, peers: PeerKV, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._clock = clock

    def longest_wait(self, runnable: RunnableSequences, busy: float) -> float | None:
        """Return the longest time from a token until the planned step, of the sequences that join after a handoff."""
        joining = (sequence for sequence in chain(runnable.decodes, runnable.prompts) if sequence.joins_after_handoff)
        first = min((sequence.request.waits_since for sequence in joining), default=None)
        return None if first is None else self._clock() + busy - first

    def arrival_in(self, busy: float) -> float | None:
        """Return the seconds from the start of the planned step until the next stream joins; None if none is near.

        Streams that are long overdue do not count.
        """
        begin = self._clock() + busy
        return min((at - begin for at in self._peers.arrivals if at > begin - OVERDUE), default=None)
