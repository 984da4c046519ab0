"""The sequences of all requests by state, and the end of each: its blocks, its row in the runner, its request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from engine.grammars.constraints import GrammarConstraints
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.scheduler.microbatch import StepsInFlight
from engine.scheduler.waiting_queue import WaitingQueue
from engine.sequence import Sequence
from pdserve.ipc.messages import EventBatch


class LiveSequences:
    """Waiting, loading, running and paused sequences; each is in one of these states.

    A paused sequence keeps its blocks, and no step includes it. When its request is resumed, it waits to run again.
    Until it runs it is ``preemptible``: its blocks are the first that are taken when blocks run out.
    """

    def __init__(self, kv: KVCacheManager, events: EventBatch) -> None:
        self.waiting = WaitingQueue()
        self.loading: dict[int, Sequence] = {}  # by rid: the connector loads the prompt into held blocks
        self.running: dict[int, Sequence] = {}  # by seq, in order of admission
        self.paused: dict[int, Sequence] = {}  # by seq
        self.preemptible: dict[int, Sequence] = {}  # by seq: has blocks and is paused or waits; longest paused first
        self.requests: dict[int, Request] = {}  # by rid, with a sequence in any state
        self._sequences: dict[int, dict[int, Sequence]] = {}  # all sequences of a request, by rid, then by seq
        self.for_peers = 0  # requests whose prompts other nodes decode
        self.finished: list[int] = []  # sequences that the runner must drop
        self._kv = kv
        self._events = events

    def queue(self, sequence: Sequence) -> None:
        """Append the first sequence of a request; one that continues a stream goes to the head, as if preempted."""
        self.requests[sequence.rid] = sequence.request
        self._sequences[sequence.rid] = {sequence.seq: sequence}
        self.for_peers += sequence.for_peer
        self._events.status_changed |= sequence.request.paused
        self.wait(sequence, first=sequence.has_output or sequence.request.urgent)

    def queue_choices(self, choices: list[Sequence]) -> None:
        """Put further choices of a live request at the head of the queue, in their order."""
        for sequence in choices:
            self._sequences[sequence.rid][sequence.seq] = sequence
            if sequence.table.blocks:
                self.preemptible[sequence.seq] = sequence
        for sequence in reversed(choices):
            self.wait(sequence, first=True)

    def wait(self, sequence: Sequence, *, first: bool) -> None:
        """Put a sequence at the head or the end of the queue; if its request is paused, keep it out."""
        if sequence.request.paused:
            self.paused[sequence.seq] = sequence
        elif first:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        """Let a sequence with blocks take part in steps, unless its request is paused."""
        if sequence.request.paused:
            self.paused[sequence.seq] = self.preemptible[sequence.seq] = sequence
        else:
            self.preemptible.pop(sequence.seq, None)
            self.running[sequence.seq] = sequence

    def pause(self, request: Request) -> None:
        """Keep a request out of steps. A loading sequence goes on until its KV is here, computed or read."""
        request.paused = True
        self._events.status_changed = True
        for sequence in self.of_request(request.rid):
            if self.running.pop(sequence.seq, None) is not None:
                self.drop_in_runner(sequence)
                self.waiting.charge_output(sequence)
                self.run(sequence)
            elif request.rid not in self.loading:
                self.waiting.remove(sequence)
                self._kv.set_aside(sequence)
                self.wait(sequence, first=True)

    def resume(self, request: Request, now: float) -> None:
        """Queue a paused request, before the others of its client if it was admitted before or has output."""
        request.paused = False
        self._events.status_changed = True
        for sequence in reversed(self.of_request(request.rid)):
            if self.paused.pop(sequence.seq, None) is not None:
                request.waits_since = now
                self.wait(sequence, first=request.cached_tokens is not None or sequence.has_output)
                if self.preemptible.pop(sequence.seq, None) is not None:
                    self.preemptible[sequence.seq] = sequence  # after the paused ones

    @property
    def streams_loading(self) -> bool:
        """Whether requests of this node are being loaded. A prompt for a peer waits for no other prompt then."""
        return any(not sequence.for_peer for sequence in self.loading.values())

    @property
    def streams_coming(self) -> bool:
        """Whether a loading sequence of this node will decode as soon as its KV is here."""
        return any(not sequence.for_peer and sequence.split is None for sequence in self.loading.values())

    @property
    def longest_paused(self) -> Sequence | None:
        """The first sequence to preempt; None if every sequence with blocks runs or loads."""
        return next((sequence for sequence in self.preemptible.values() if not sequence.in_flight), None)

    def of_request(self, rid: int) -> list[Sequence]:
        """Return the sequences of a request; none if the rid is unknown."""
        return list(self._sequences.get(rid, {}).values())

    @property
    def any_runnable(self) -> bool:
        """Whether a sequence takes part in steps and does not wait for a mask."""
        return any(not sequence.blocked for sequence in self.running.values()) or any(
            sequence.split is not None and sequence.missing and not sequence.blocked
            for sequence in self.loading.values()
        )

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

        def order(sequence: Sequence) -> tuple[int, int]:
            return sequence.request.priority, counts[sequence.request.client]

        return max(preemptible, key=order, default=None)  # the first of equals

    @property
    def newest_for_peers(self) -> list[Sequence]:
        """The newest running prompt for a peer, to be refused where nothing can be preempted."""
        return [sequence for sequence in self.running.values() if sequence.for_peer][-1:]

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Free the blocks of a sequence. If it was running or loading, queue it before the others of its client."""
        self._free(sequence)
        if self.preemptible.pop(sequence.seq, None) is not None:
            return
        self.drop_in_runner(sequence)
        if self.running.pop(sequence.seq, None) is not None:
            self.waiting.charge_output(sequence)
        sequence.request.waits_since = now
        self.wait(sequence, first=True)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, and its request with the last one."""
        request = sequence.request
        self.drop_in_runner(sequence)
        if self.running.pop(sequence.seq, None) is not None:
            self.waiting.charge_output(sequence)
        elif self.paused.pop(sequence.seq, None) is None and self.loading.pop(request.rid, None) is None:
            self.waiting.remove(sequence)
        self.preemptible.pop(sequence.seq, None)
        sequence.end()
        self.free_unless_in_flight(sequence)
        remaining = self._sequences[request.rid]
        del remaining[sequence.seq]
        if not remaining:
            del self._sequences[request.rid]
            del self.requests[request.rid]
            self.for_peers -= sequence.for_peer

    def free_unless_in_flight(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence, unless a step in flight writes to them."""
        if not sequence.in_flight:
            self._free(sequence)

    def take_finished(self) -> tuple[int, ...]:
        """Return the sequences that the runner must drop since the last call."""
        finished = tuple(self.finished)
        self.finished = []
        return finished

    def drop_in_runner(self, sequence: Sequence) -> None:
        """Have the runner forget a sequence, if it knows it."""
        if sequence.drop_in_runner():
            self.finished.append(sequence.seq)

    def _free(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        self._events.status_changed = True


class OpenRequests:
    """The requests and sequences that use adapters: an AdapterUsers."""

    def __init__(self, live: LiveSequences, in_flight: StepsInFlight, constraints: GrammarConstraints) -> None:
        self._live = live
        self._in_flight = in_flight
        self._constraints = constraints

    def requests(self) -> Iterator[Request]:
        return chain(self._live.requests.values(), self._constraints.compiling)

    def with_slots(self) -> Iterator[Sequence]:
        return chain(self._live.running.values(), self._live.loading.values(), self._in_flight.sequences)

    def waiting(self) -> Iterator[Sequence]:
        return iter(self._live.waiting)
