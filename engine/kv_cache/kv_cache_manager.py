"""Manages the KV blocks of sequences: finds cached ones, allocates fresh ones, caches full ones, frees all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.kv_cache.block_pool import BlockPool, Use
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.state_slots import StateSlots
from engine.request import Sequence
from pdserve.state import NO_SLOT


class KVCacheManager:
    """``states`` are the slots of a model with recurrent layers."""

    def __init__(
        self, pool: BlockPool, connector: KVConnectorScheduler, block_size: int, states: StateSlots | None = None
    ) -> None:
        self._pool = pool
        self._states = states
        self._connector = connector
        self._block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def fits(self, sequence: Sequence) -> bool:
        """Return whether ``allocate`` would succeed now."""
        return self._find(sequence) is not None

    def allocate(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens: cached ones first, then adjacent ones. Return False if too few are free."""
        found = self._find(sequence)
        if found is None:
            return False
        cached, num_fresh, source, num_matched = found
        self._pool.hold(cached)
        fresh = self._pool.take(num_fresh, after=cached[-1] if cached else None)
        assert fresh is not None
        sequence.hold(cached + fresh, len(cached) * self._block_size, self._block_size)
        if self._states is not None:
            self._states.allocate(sequence, source, sequence.num_computed, num_matched * self._block_size)
        return True

    def grow(self, sequences: Iterable[Sequence]) -> bool:
        """Allocate the missing blocks of all sequences. Return False, and allocate none, if too few are free."""
        short = [sequence for sequence in sequences if sequence.length > sequence.capacity]
        if not short:
            return True
        counts = [self.blocks_for(sequence.length) - len(sequence.blocks) for sequence in short]
        blocks = self._pool.take(sum(counts), after=short[0].blocks[-1])
        if blocks is None:
            return False
        fresh = iter(blocks)
        for sequence, count in zip(short, counts, strict=True):
            sequence.hold_more(islice(fresh, count), self._block_size)
        return True

    def grow_for_drafts(self, sequences: Iterable[Sequence], most: int) -> None:
        """Allocate blocks for up to ``most`` drafts of each sequence, while blocks are free; a step needs no drafts."""
        for sequence in sequences:
            num_missing = self.blocks_for(sequence.length + sequence.draft_limit(most)) - len(sequence.blocks)
            if num_missing > 0:
                blocks = self._pool.take(num_missing, after=sequence.blocks[-1])
                if blocks is None:
                    return
                sequence.hold_more(blocks, self._block_size)

    def hash_prompt(self, sequence: Sequence) -> None:
        """Compute the block hashes of a prompt in advance, for ``cache_full_blocks``."""
        sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)

    def look_up(self, sequence: Sequence) -> None:
        """Record how much of a waiting prompt is cached. Its hashes are kept."""
        most = min(sequence.prompt_len - 1, sequence.reusable)
        num_cached = len(self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, most)))
        if self._states is not None:
            num_cached, _ = self._states.find(sequence.hashes.upto(sequence.token_ids, num_cached * self._block_size))
        sequence.looked_up(num_cached * self._block_size)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Enter the blocks that are full by now into the prefix cache."""
        hashes = sequence.hashes.upto(sequence.token_ids, sequence.num_computed)
        for index in range(sequence.next_full // self._block_size - 1, len(hashes)):
            self._pool.cache(hashes[index], sequence.blocks[index])
        sequence.cached((len(hashes) + 1) * self._block_size)
        if self._states is not None:
            self._states.settle(sequence)

    def received(self, sequence: Sequence, num_tokens: int) -> None:
        """All KV of a load is here, cached or read from a peer: that of the first ``num_tokens`` tokens."""
        sequence.loaded(num_tokens)
        if sequence.state is not None:
            sequence.state.passed(num_tokens)
        self.cache_full_blocks(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, except those that a transfer may still write to. No step may be in flight."""
        assert not sequence.in_flight, f"sequence {sequence.seq} frees blocks that a step still writes to"
        quarantined = self._connector.abandon_load(sequence)  # and the slot of a state
        self._pool.drop([block for block in sequence.blocks if block not in quarantined], Use.HELD)
        sequence.drop_blocks()
        if self._states is not None:
            self._states.free(sequence)

    def _find(self, sequence: Sequence) -> tuple[list[int], int, int, int] | None:
        """Return the blocks of the cached prefix, the number of further blocks, and of a recurrent model two more.

        These are the slot with the state at the end of the prefix, and the number of blocks of the longest cached
        prefix with or without a state. None if too few blocks or slots are free.
        """
        cached = self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable))
        num_matched, source = len(cached), NO_SLOT
        if self._states is not None:
            if not self._connector.loadable(sequence):  # a load brings the state
                hashes = sequence.hashes.upto(sequence.token_ids, num_matched * self._block_size)
                num_cached, source = self._states.find(hashes)
                cached = cached[:num_cached]
            if not self._states.has_room(sequence, source):
                return None
        num_fresh = self.blocks_for(len(sequence.token_ids)) - len(cached)
        if num_fresh > self._pool.count(Use.FREE) - self._pool.count_free(cached):
            return None
        return cached, num_fresh, source, num_matched
