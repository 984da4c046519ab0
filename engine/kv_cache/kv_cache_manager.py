"""The KV blocks of sequences: cached ones found again, fresh ones handed out, full ones remembered, all given back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.kv_cache.block_pool import BlockPool, Use
from engine.request import Sequence
from pdserve.protocols import KVConnectorScheduler


class KVCacheManager:
    """Who of the sequences holds which blocks of the pool."""

    def __init__(self, pool: BlockPool, connector: KVConnectorScheduler, block_size: int) -> None:
        self._pool = pool
        self._connector = connector
        self._block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def fits(self, sequence: Sequence) -> bool:
        """Whether a sequence without blocks would get them if they were asked for now."""
        return self._find(sequence) is not None

    def allocate(self, sequence: Sequence) -> bool:
        """Blocks for all tokens it has: cached ones first, then adjacent ones. False if there are too few."""
        found = self._find(sequence)
        if found is None:
            return False
        cached, wanted = found
        self._pool.hold(cached)
        fresh = self._pool.take(wanted, after=cached[-1] if cached else None)
        assert fresh is not None
        sequence.blocks = cached + fresh
        sequence.room = len(sequence.blocks) * self._block_size
        sequence.num_computed = sequence.num_launched = len(cached) * self._block_size
        sequence.full_at = sequence.num_computed + self._block_size
        return True

    def grow(self, sequences: Iterable[Sequence]) -> bool:
        """Blocks for all tokens of each one, where it lacks some. False, and none for any, if too few are free."""
        short = [sequence for sequence in sequences if sequence.length > sequence.room]
        if not short:
            return True
        lacking = [self.blocks_for(sequence.length) - len(sequence.blocks) for sequence in short]
        blocks = self._pool.take(sum(lacking), after=short[0].blocks[-1])
        if blocks is None:
            return False
        fresh = iter(blocks)
        for sequence, count in zip(short, lacking, strict=True):
            sequence.blocks += islice(fresh, count)
            sequence.room += count * self._block_size
        return True

    def prepare(self, sequence: Sequence) -> None:
        """Do what ``filled`` will need of a prompt whose KV is on its way, so that it takes less time then."""
        sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)

    def look(self, sequence: Sequence) -> None:
        """Find out how much of a prompt that waits is cached. What is hashed for it need not be hashed again."""
        most = min(sequence.prompt_len - 1, sequence.reusable)
        cached = self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, most))
        sequence.expected = len(cached) * self._block_size

    def filled(self, sequence: Sequence) -> None:
        """So many tokens are computed that blocks are full: these become findable."""
        hashes = sequence.hashes.upto(sequence.token_ids, sequence.num_computed)
        for index in range(sequence.full_at // self._block_size - 1, len(hashes)):
            self._pool.remember(hashes[index], sequence.blocks[index])
        sequence.full_at = (len(hashes) + 1) * self._block_size

    def received(self, sequence: Sequence) -> None:
        """The KV of the whole prompt is there: what was not cached has been read from a peer."""
        sequence.num_computed = sequence.num_launched = sequence.prompt_len
        self.filled(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Its blocks are free again, but for those a transfer may still write to. No step in flight may include it."""
        assert not sequence.in_flight, f"sequence {sequence.seq} gives blocks back that a step still writes to"
        quarantined = self._connector.abandon_load(sequence)
        self._pool.drop([block for block in sequence.blocks if block not in quarantined], Use.HELD)
        sequence.blocks = []
        sequence.num_computed = sequence.num_launched = sequence.room = 0

    def _find(self, sequence: Sequence) -> tuple[list[int], int] | None:
        """The blocks of its cached prefix, and how many more it needs; None if there are too few."""
        cached = self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable))
        wanted = self.blocks_for(len(sequence.token_ids)) - len(cached)
        if wanted > self._pool.count(Use.FREE) - self._pool.count_free(cached):
            return None
        return cached, wanted
