"""Slots of recurrent state: the use of each one, and snapshots for prefix hits.

A model with recurrent layers keeps one state per sequence, which every step overwrites (``StateLayout``). The KV of a
cached prefix is of use only with the state at its end, so states are copied at some block boundaries:

    sequence   own slot ──steps──► … ──ended──► free
    stored amid   │  ▲
    a step, or    │  └── copied before its first step: a prefix hit, which computes the rest
    copied behind ▼
    snapshot   held ──step applied──► cached under the hash of its last block ──► evicted, least recently used first

    lease      on P, a copy behind a chunk of a peer's prompt, so that the sequence may go on meanwhile, or the
               snapshot that the sequence begins with
    received   on D, a snapshot at once if it is at a block boundary; the sequence then begins with a copy, as all
               choices of a prompt do whose last block has a part of an image

Snapshots are made where later prompts will probably branch off: at the last block boundary of a prompt, at the end of a
cached prefix whose state was missing, and after every ``DISTANCE`` tokens. A step stores one of them amid a chunk of
the prompt, so a prompt needs no extra step. While a sequence decodes, one snapshot follows it. Decodes with drafts end
before the token of the next one, so no snapshot has the state of a draft. A peer gets the state at the end of the
prompt; for several choices, at the last block boundary of the prompt (``handoff_position``), unless an image is behind
it, which a peer without a vision tower cannot compute again.

Copies run in the order of the device's stream. Transfers do not: they wait until steps have been applied. So a slot
that is copied from stays held until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.kv_cache.block_pool import Use
from engine.kv_cache.states import States
from engine.sequence import Sequence
from engine.sequence_state import SequenceState
from pdserve.kv.states import LEAST_SLOTS, NO_SLOT, StateOrders, StateSnapshot, handoff_position

DISTANCE = 8192  # tokens between snapshots of a long prompt, at least: they bound what is computed again
DECODE_DISTANCE = 256  # tokens between snapshots of a sequence that decodes


class StateSlots(States):
    """The slots of one node. All ranks use the same numbers."""

    recurrent = True

    def __init__(self, num_slots: int, block_size: int) -> None:
        assert num_slots >= LEAST_SLOTS
        super().__init__(num_slots)
        self._block_size = block_size
        self._distance = max(1, DISTANCE // block_size) * block_size
        self._decode_distance = max(1, DECODE_DISTANCE // block_size) * block_size
        self._snapshots: list[StateSnapshot] = []
        self._copies: list[tuple[int, int]] = []
        self._sources: list[int] = []  # sources for the step being planned; sequences append to it
        self._in_flight: deque[tuple[int, list[int]]] = deque()  # (step, sources) of steps in flight

    def find(self, hashes: list[bytes]) -> tuple[int, int]:
        for index in range(len(hashes) - 1, -1, -1):
            if (slot := self.pool.find(hashes[index])) is not None:
                return index + 1, slot
        return 0, NO_SLOT

    def num_lacking(self, sequence: Sequence, source: int) -> int:
        """A prompt for a peer that begins with the very state that the peer needs takes no spare slot."""
        kept = source != NO_SLOT and self.pool.count_free((source,))
        return 1 + sequence.for_peer + kept - self.pool.count(Use.FREE)

    def allocate(self, sequence: Sequence, source: int, num_cached: int, num_matched: int) -> None:
        choices = 1 if sequence.ends_amid_image_block else sequence.request.sampling.n
        lease_at = handoff_position(sequence.prompt_len, choices, self._block_size)
        leases_source = sequence.for_peer and source != NO_SLOT and num_cached == lease_at
        if source != NO_SLOT:
            self.pool.hold((source,) * (1 + leases_source))
        needs_spare = sequence.for_peer and not leases_source
        slots = self.pool.take(1 + needs_spare)
        assert slots is not None
        last = (len(sequence.token_ids) - 1) // self._block_size * self._block_size
        after = num_cached // self._distance * self._distance + self._distance
        stops = {last, num_matched, *range(after, last, self._distance)}
        if sequence.request.branches:
            stops.add(sequence.shared_len)
        sequence.state = SequenceState(
            slots[0],
            self._sources,
            source,
            spare=slots[1] if needs_spare else NO_SLOT,
            lease_slot=source if leases_source else NO_SLOT,
            lease_at=lease_at,
            decode_distance=self._decode_distance,
            stops=sorted((stop for stop in stops if num_cached < stop <= last), reverse=True),
        )

    def launched(self, sequence: Sequence, num_tokens: int) -> None:
        state = sequence.state
        assert state is not None
        begin = sequence.num_launched - num_tokens
        if state.stops and state.stops[-1] < sequence.num_launched:
            self._take_snapshot_amid(sequence, begin, state.stops.pop())
        if state.stops and state.stops[-1] == sequence.num_launched:
            state.stops.pop()
            self._take_snapshot(sequence)
        if state.spare != NO_SLOT and sequence.num_launched == state.lease_at:
            self._copies.append((state.slot, state.take_spare()))

    def received(self, sequence: Sequence, num_tokens: int) -> int:
        """Take the state that came with the KV: after all tokens, or for several choices at the last block boundary."""
        choices = 1 if sequence.ends_amid_image_block else sequence.num_loading_choices
        num_tokens = handoff_position(num_tokens, choices, self._block_size)
        assert sequence.state is not None
        sequence.state.passed(num_tokens)
        if num_tokens % self._block_size == 0:
            self._keep_received(sequence, sequence.state, num_tokens)
        return num_tokens

    def _keep_received(self, sequence: Sequence, state: SequenceState, num_tokens: int) -> None:
        """Make a snapshot of a received state, if a slot is free. A peer that needs this very state reads it."""
        if state.spare != NO_SLOT and num_tokens == state.lease_at:
            self.pool.hold((state.slot,))  # for the lease, and as a source
            state.lease_received()
            self._cache(sequence, num_tokens, state.lease_slot)
            return
        block_hash = sequence.hashes.upto(sequence.token_ids, num_tokens)[-1]
        if self.pool.find(block_hash) is None and (slots := self.pool.take(1)) is not None:
            self._cache(sequence, num_tokens, state.slot)
            state.start_from(state.slot, slots[0])

    def may_branch(self, sequence: Sequence) -> bool:
        """Only a received state: steps have not overwritten it, and the runner will be told where it is."""
        state = sequence.state
        assert state is not None
        is_received = sequence.sent_blocks < 0 and sequence.num_computed == sequence.prompt_len
        return is_received and self.pool.count(Use.FREE) >= 1 + (state.source == NO_SLOT)

    def branch(self, sequence: Sequence, choice: Sequence) -> None:
        """Both begin with copies of the state. The first branch makes its slot a source."""
        state = sequence.state
        assert state is not None
        if state.source == NO_SLOT:
            state.start_from(state.slot, self._take_one())
        self.pool.hold((state.source,))
        own = self._take_one()
        choice.state = SequenceState(own, self._sources, state.source, decode_distance=self._decode_distance)

    def decoded(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.num_launched % self._decode_distance == 0:
                self._take_snapshot(sequence)

    def take_orders(self, step: int) -> StateOrders:
        orders = StateOrders(tuple(self._snapshots), tuple(self._copies))
        self._snapshots.clear()
        self._copies.clear()
        if self._sources:
            self._in_flight.append((step, self._sources.copy()))
            self._sources.clear()
        return orders

    def applied(self, step: int) -> None:
        while self._in_flight and self._in_flight[0][0] <= step:
            self.pool.drop(self._in_flight.popleft()[1], Use.HELD)

    def settle(self, sequence: Sequence) -> None:
        state = sequence.state
        assert state is not None
        while state.pending and state.pending[0][0] <= sequence.num_computed:
            num_tokens, slot = state.pending.pop(0)
            block_hash = self._cache(sequence, num_tokens, slot)
            self.pool.drop((slot,), Use.HELD)
            if num_tokens > sequence.prompt_len:
                self.pool.forget(state.decode_hash)
                state.decode_hash = block_hash

    def take_lease(self, sequence: Sequence) -> int:
        state = sequence.state
        assert state is not None
        slot = state.lease_slot
        state.lease_slot = NO_SLOT
        if slot != NO_SLOT:
            self.pool.move((slot,), Use.HELD, Use.LEASED)
        return slot

    def free(self, sequence: Sequence) -> None:
        if sequence.state is not None:
            self.pool.drop(sequence.state.slots, Use.HELD)
            sequence.state = None

    def _cache(self, sequence: Sequence, num_tokens: int, slot: int) -> bytes:
        """Enter a snapshot into the prefix cache, unless there is one after these tokens; return its hash."""
        block_hash = sequence.hashes.upto(sequence.token_ids, num_tokens)[-1]
        if self.pool.cache((block_hash,), (slot,)):
            self.pool.recorder.store(sequence, num_tokens // self._block_size - 1, 0)
        return block_hash

    def _take_one(self) -> int:
        slots = self.pool.take(1)
        assert slots is not None, "no slot is free, after may_branch"
        return slots[0]

    def _take_snapshot(self, sequence: Sequence) -> None:
        """Order a snapshot, if a slot is free for it."""
        state = sequence.state
        assert state is not None
        slots = self.pool.take(1)
        if slots is not None:
            self._copies.append((state.slot, slots[0]))
            state.pending.append((sequence.num_launched, slots[0]))

    def _take_snapshot_amid(self, sequence: Sequence, begin: int, end: int) -> None:
        """Order the state after ``end`` tokens for prefix hits, if a slot is free, and for a peer that needs this one.

        The step's chunk begins at ``begin`` tokens. It has a snapshot in one slot; a second one is a copy of that.
        """
        state = sequence.state
        assert state is not None
        slots = list(self.pool.take(1) or ())
        if slots:
            state.pending.append((end, slots[0]))
        if state.spare != NO_SLOT and state.lease_at == end:
            slots.insert(0, state.take_spare())
        if slots:
            self._snapshots.append(StateSnapshot(sequence.seq, end - begin, slots[0]))
            self._copies += [(slots[0], slot) for slot in slots[1:]]
