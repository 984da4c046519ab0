"""Room for sequences: places among ``max_num_seqs``, and KV blocks. Which sequence gets it or gives it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from engine.adapters.adapters import Adapters
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.revocation import Lacking
from engine.scheduler.live_sequences import LiveSequences
from engine.scheduler.step_results import Emit, no_emit
from engine.sequence import Sequence
from pdserve.ipc.messages import EventBatch, Reserved, Totals

_FETCHED_AHEAD = 8  # waiting sequences whose KV is fetched while others are computed


class Room:
    """Admits waiting sequences and preempts others. ``clock`` is the scheduler's."""

    def __init__(
        self,
        live: LiveSequences,
        kv: KVCacheManager,
        connector: KVConnectorScheduler,
        events: EventBatch,
        totals: Totals,
        *,
        adapters: Adapters,
        max_num_seqs: int,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._kv = kv
        self._peers = connector.peers
        self._tiers = connector.tiers
        self._events = events
        self._totals = totals
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self.emit: Emit = no_emit  # called when an event should not wait for the rest of a plan

    @property
    def free_places(self) -> int:
        return self._max_num_seqs - len(self._live.running) - len(self._live.loading)

    @property
    def head(self) -> Sequence | None:
        """The sequence to admit next; None if no waiting sequence can continue or ``max_num_seqs`` are running.

        Sequences pass others that wait for a fetch, or for a slot of their adapter.
        """
        head = self._live.waiting.head if self.free_places > 0 else None
        lacks_slot = self._adapters.lacking()
        if head is not None and (self._tiers.fetching(head) or lacks_slot(head)):
            fetching = self._tiers.fetching
            passing = (other for other in self._live.waiting if not (fetching(other) or lacks_slot(other)))
            head = next(passing, None)
        return None if head is None or head.blocked or head.in_flight else head

    def _begin_fetches(self) -> None:
        """Begin the fetches of the next waiting sequences, as far as there is room for these and those before them."""
        tiers = self._tiers
        if not tiers.fetches or not self._live.waiting:
            return
        room = self._kv.num_free
        for sequence in islice(self._live.waiting, min(self.free_places, _FETCHED_AHEAD)):
            if sequence.table.blocks:
                continue
            room -= self._kv.blocks_for(sequence.length)
            if not tiers.considered(sequence) and (room < 0 or not self._kv.fits(sequence)):
                return
            tiers.fetch(sequence)

    def fetch(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is to wait for a fetch, which begins now unless that was decided before."""
        tiers = self._tiers
        if not tiers.fetches or sequence.table.blocks:
            return False
        return (tiers.considered(sequence) or self._kv.fits(sequence)) and tiers.fetch(sequence)

    def advance(self, prompts: Iterable[Sequence]) -> None:
        """Let new waiting prompts be admitted in this order, each in the turn of its client.

        The order stays while the head of the queue lacks room, so that it gets the room that becomes free next.
        """
        head = self.head
        if head is not None and self.may_have_blocks(head):
            self._live.waiting.advance(sequence for sequence in prompts if not (sequence.blocked or sequence.in_flight))

    def lacks_slot(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has to wait for a slot of its adapter."""
        return self._adapters.lacking()(sequence)

    def may_have_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has kept its blocks, or may find some."""
        return bool(sequence.table.blocks or self._live.preemptible) or self._kv.fits(sequence)

    def allocate(self, sequence: Sequence) -> bool:
        """Allocate the blocks that a waiting sequence lacks. Return False if too few are free.

        Then leases of pulls are asked for, if their blocks suffice.
        """
        while not (self._kv.grow((sequence,)) if sequence.table.blocks else self._kv.allocate(sequence)):
            if not (self._tiers.give_way() or self.preempt_paused()):  # the sequence may lose its own
                self._peers.revoke(partial(self._lacking, sequence))
                return False
        return True

    def take_back(self, sequences: tuple[Sequence, ...]) -> bool:
        """Ask for leases of pulls if running sequences cannot grow otherwise. Return whether any have to end first."""
        return self._peers.revoke(partial(self._kv.lacking_to_grow, sequences))

    def _lacking(self, sequence: Sequence) -> Lacking:
        if sequence.table.blocks:
            return self._kv.lacking_to_grow((sequence,))
        return self._kv.lacking_to_allocate(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence that has blocks out of the queue, and give its adapter a slot."""
        request = sequence.request
        self._adapters.admit(sequence)
        self._live.waiting.admit(sequence, sequence.num_computed)
        if request.cached_tokens is None:
            request.cached_tokens = sequence.num_computed
            self._totals.prefix_cached_tokens += sequence.num_computed
            self._totals.admitted_prompt_tokens += sequence.prompt_len

    def admit_loads(self) -> None:
        """Admit waiting requests that load, and begin fetches.

        KVLoads pass prompts that wait for a step, unless these would lack room.
        """
        self._begin_fetches()
        prompts_ahead = 0
        blocks_ahead = 0
        adapters_ahead = set[str]()
        lacks_slot = self._adapters.lacking(adapters_ahead)
        for sequence in list(self._live.waiting):
            if self.free_places <= prompts_ahead:
                return
            if lacks_slot(sequence):
                continue
            needed = self._kv.blocks_for(sequence.length)
            if not self._peers.loadable(sequence):
                prompts_ahead += 1
                blocks_ahead += needed
                adapters_ahead.add(sequence.request.sampling.adapter)
            elif not (sequence.blocked or sequence.in_flight):
                lacks_blocks = prompts_ahead and blocks_ahead + needed > self._kv.num_free
                if self.fetch(sequence):
                    continue
                if lacks_blocks or not self._reserve(sequence):
                    return
                self.admit(sequence)
                self._live.loading[sequence.rid] = sequence
                self._peers.load(sequence)
                lacks_slot = self._adapters.lacking(adapters_ahead)  # it may have the last one

    def _reserve(self, sequence: Sequence) -> bool:
        """Allocate the blocks of a load. That they are free is told before: to evict what they cache takes a while."""
        num_cached = None if sequence.table.blocks else self._kv.find_cached(sequence)
        if num_cached is not None:
            self._events.reserved.append(Reserved(sequence.rid, num_cached))
            self.emit()
        if not self.allocate(sequence):
            return False
        if num_cached is None:
            self._events.reserved.append(Reserved(sequence.rid, sequence.num_computed))
        return True

    def preempt_paused(self) -> bool:
        """Free the blocks of the sequence that has been paused longest. Return False if there is none with blocks."""
        if (sequence := self._live.longest_paused) is not None:
            self.preempt(sequence)
        return sequence is not None

    def preempt(self, sequence: Sequence | None) -> None:
        assert sequence is not None, "blocks ran out, and no sequence can be preempted"
        self._totals.preemptions += 1
        self._totals.preempted_tokens += sequence.num_computed
        self._live.preempt(sequence, self._clock())
