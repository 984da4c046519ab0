"""The sequences of all requests by state, and the end of each: its blocks, its row in the runner, its request."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from engine.ipc.messages import Batch
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Request, Sequence
from engine.scheduler.waiting_queue import WaitingQueue


class LiveSequences:
    """Waiting, loading and running sequences; each is in one of these states."""

    def __init__(self, kv: KVCacheManager, events: Batch) -> None:
        self.waiting = WaitingQueue()
        self.loading: dict[int, Sequence] = {}  # by rid: the connector loads the prompt into held blocks
        self.running: dict[int, Sequence] = {}  # by seq, in order of admission
        self._requests: dict[int, Request] = {}
        self.finished: list[int] = []  # sequences that the runner must drop
        self._kv = kv
        self._events = events

    def queue(self, sequence: Sequence) -> None:
        """Append the first sequence of a request."""
        self._requests[sequence.rid] = sequence.request
        self.waiting.append(sequence)

    def of_request(self, rid: int) -> list[Sequence]:
        """Return the sequences of a request; none if the rid is unknown."""
        request = self._requests.get(rid)
        return list(request.sequences.values()) if request is not None else []

    @property
    def any_runnable(self) -> bool:
        """Whether a running sequence does not wait for a mask."""
        return any(not sequence.blocked for sequence in self.running.values())

    def counts(self) -> Counter[int]:
        """Count the sequences with blocks by client."""
        return Counter(sequence.request.client for sequence in chain(self.running.values(), self.loading.values()))

    @property
    def least_urgent(self) -> Sequence | None:
        """The sequence to preempt: of the least urgent ones, the last admitted of the client with the most sequences.

        A sequence for a peer is not preempted: its leased blocks would not become free.
        """
        counts = self.counts()
        preemptible = [sequence for sequence in reversed(self.running.values()) if not sequence.for_peer]
        order = lambda s: (s.request.priority, counts[s.request.client])  # noqa: E731
        return max(preemptible, key=order, default=None)  # the first of equals

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Free the blocks of a running or loading sequence and queue it before the others of its client."""
        if self.running.pop(sequence.seq, None) is not None:
            self._drop_in_runner(sequence)
            self.waiting.charge_output(sequence)
        self._free(sequence)
        sequence.request.waits_since = now
        self.waiting.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, and its request with the last one."""
        request = sequence.request
        if self.running.pop(sequence.seq, None) is not None:
            self._drop_in_runner(sequence)
            self.waiting.charge_output(sequence)
        elif self.loading.pop(request.rid, None) is None:
            self.waiting.remove(sequence)
        sequence.ended = True
        self.free_unless_in_flight(sequence)
        del request.sequences[sequence.choice]
        if not request.sequences:
            del self._requests[request.rid]

    def free_unless_in_flight(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence, unless a step in flight writes to them."""
        if not sequence.in_flight:
            self._free(sequence)

    def take_finished(self) -> tuple[int, ...]:
        """Return the sequences that the runner must drop since the last call."""
        finished, self.finished = tuple(self.finished), []
        return finished

    def _free(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        self._events.blocks_freed = True

    def _drop_in_runner(self, sequence: Sequence) -> None:
        if sequence.sent_blocks >= 0:
            self.finished.append(sequence.seq)
            sequence.sent_blocks = -1
