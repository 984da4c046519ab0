"""Manages the KV blocks of sequences: finds cached ones, allocates fresh ones, caches full ones, frees all.

A sequence has a block table per KV cache group (pdserve/kv/groups.py). Full groups get blocks for all of its tokens
when it is admitted. Groups with a window get them step by step, for the tokens that a step computes; a block behind
the window is freed when the steps that see it have ended, and stays in the prefix cache:

    full        ████████████████████████████████████     of the whole prompt, from the admission on
    window      ········▓▓▓▓████████····················  · no block   ▓ window   █ steps in flight

So a prompt of any length holds a window and the tokens of its steps in these groups. At admission the blocks of one
largest step must be free; if they run short later, chunks become smaller, down to a block, before a sequence is
preempted for another. ``submit`` refuses a request whose groups together could never hold that much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from engine.kv_cache.block_copies import BlockCopies
from engine.kv_cache.block_pool import BlockPool, Use
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.revocation import Lacking, Shortage
from engine.kv_cache.states import States
from engine.sequence import Sequence
from pdserve.images import tokens_to_end
from pdserve.kv.groups import NULL_BLOCK, first_block, first_seen, window_blocks
from pdserve.kv.states import NO_SLOT, StateOrders


class _Allocation(NamedTuple):
    """The blocks and the state that ``allocate`` gives to a sequence."""

    cached: list[int]  # blocks of the cached prefix
    num_fresh: int  # further blocks
    covered: int  # end of the logical blocks that groups with a window get at once
    state_from: int  # slot with the recurrent state at the end of the prefix
    num_matched: int  # logical blocks of the longest cached prefix, with or without a state at its end


class KVCacheManager:
    """``states`` are the slots of a model with recurrent layers."""

    def __init__(
        self,
        pool: BlockPool,
        connector: KVConnectorScheduler,
        block_size: int,
        max_batch_tokens: int,
        states: States,
        whole_images: bool = False,
    ) -> None:
        """``whole_images``: a step computes all tokens of an image that have no KV yet."""
        assert not (states.recurrent and pool.groups.has_windows), "no model has recurrent layers and windows"
        self._pool = pool
        self._states = states
        self._connector = connector
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._whole_images = whole_images
        self._groups = pool.groups
        self._num_groups = pool.groups.num_groups
        windows = pool.groups.windows
        self._windows = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._num_full = len(windows) - len(self._windows)  # groups
        self._copies = BlockCopies(pool)

    @property
    def num_free(self) -> int:
        return self._pool.count(Use.FREE)

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a sequence needs at most while it grows to ``num_tokens``."""
        return self._groups.blocks_for(num_tokens, self._block_size, self._max_batch_tokens)

    def fits(self, sequence: Sequence) -> bool:
        """Return whether ``allocate`` would succeed now."""
        return self._find(sequence) is not None

    def find_cached(self, sequence: Sequence) -> int | None:
        """Return the tokens with cached KV that ``allocate`` would find now; None if too few blocks are free."""
        allocation = self._find(sequence)
        return None if allocation is None else len(allocation.cached) // self._num_groups * self._block_size

    def allocate(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens: cached ones first, then adjacent ones. Return False if too few are free.

        Groups with a window get blocks for one largest step. For a load they get spare ones: where its window lies is
        known when it ends.
        """
        allocation = self._find(sequence)
        if allocation is None:
            return False
        cached = allocation.cached
        held = _blocks_of(cached) if self._windows else cached
        self._pool.hold(held)
        fresh = self._pool.take(allocation.num_fresh, after=held[-1] if held else None)
        assert fresh is not None
        num_cached = len(cached) // self._num_groups * self._block_size
        self._states.allocate(sequence, allocation.state_from, num_cached, allocation.num_matched * self._block_size)
        sequence.set_computed(num_cached)
        table = sequence.table
        table.clear()
        table.next_full = num_cached + self._block_size
        if self._windows:
            table.add(cached, self._block_size, self._num_groups)
            table.covered = num_cached
            blocks = iter(fresh)
            self._add_blocks(sequence, blocks, self._logical(len(sequence.token_ids)), allocation.covered)
            table.kept_from = [first_seen(num_cached, window, self._block_size) for _, window in self._windows]
            table.spare = list(blocks)
        else:
            table.add(cached + fresh, self._block_size, self._num_groups)
        self._connector.tiers.end_fetch(sequence)
        return True

    def branch(self, sequence: Sequence, choice: Sequence) -> None:
        """Give a choice the KV of the prompt if its last block, which ``sequence`` has, is partly an image.

        The choice shares the full blocks and gets a copy of the last one, if a block is free. Otherwise it has no
        blocks, as the choices of other prompts, and computes the tokens of the last block again. So it does in groups
        with windows.
        """
        if not sequence.ends_amid_image_block or self._windows or not self._states.may_branch(sequence):
            return
        num_shared = sequence.shared_len // self._block_size * self._num_groups
        shared = sequence.table.blocks[:num_shared]
        last = sequence.table.blocks[num_shared : num_shared + self._num_groups]
        fresh = self._pool.take(self._num_groups, after=last[-1])
        if fresh is None:
            return
        self._pool.hold(shared)
        table = choice.table
        table.add(shared + fresh, self._block_size, self._num_groups)
        table.next_full = sequence.shared_len + self._block_size
        choice.set_computed(choice.prompt_len)
        self._copies.order(table, last, fresh)
        self._states.branch(sequence, choice)

    def grow(self, sequences: Iterable[Sequence]) -> bool:
        """Allocate the missing blocks of all sequences. Return False, and allocate none, if too few are free."""
        short = self._short(sequences)
        return not short or self._grow_to(short)

    def lacking_to_allocate(self, sequence: Sequence) -> Lacking:
        """Return what ``allocate`` lacks."""
        allocation = self._needed(sequence)
        slots = Shortage(
            self._states.num_lacking(sequence, allocation.state_from), self._slots_of(allocation.state_from)
        )
        return Lacking(self._shortage(allocation), slots)

    def lacking_to_grow(self, sequences: Iterable[Sequence]) -> Lacking:
        """Return what ``grow`` lacks."""
        missing = sum(self._num_missing(*end) for end in self._short(sequences))
        return Lacking(Shortage(missing - self.num_free))

    def grow_for_drafts(self, sequences: Iterable[Sequence], behind: int = 0) -> None:
        """Allocate blocks for the drafts of each sequence, while blocks are free; a step needs no drafts.

        ``behind``: further tokens, of drafts that the model makes in this step.
        """
        for sequence in sequences:
            end = self._logical(sequence.length + sequence.drafts.num_next + behind)
            if end * self._block_size > sequence.table.capacity and not self._grow_to([(sequence, end, end)]):
                return

    def cover(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate blocks of groups with a window for its next ``num_tokens`` tokens, as far as they are free."""
        num_tokens = max(num_tokens, self._least(sequence))
        end = self._logical(sequence.num_launched + min(num_tokens, sequence.missing))
        begin = sequence.table.covered // self._block_size
        end = min(end, begin + self.num_free // len(self._windows))
        if end > begin:
            self._grow_to([(sequence, 0, end)])

    def hash_prompt(self, sequence: Sequence) -> None:
        """Compute the block hashes of a prompt in advance, for ``cache_full_blocks``."""
        sequence.hashes.upto(sequence.token_ids, sequence.prompt_len)

    def look_up(self, sequence: Sequence) -> None:
        """Record how much of a waiting prompt is cached. Its hashes are kept."""
        most = min(sequence.prompt_len - 1, sequence.reusable)
        cached = self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, most))
        num_matched = len(cached) // self._num_groups
        num_cached, _ = self._states.find(sequence.hashes.upto(sequence.token_ids, num_matched * self._block_size))
        sequence.table.cached_at_lookup = num_cached * self._block_size

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Enter the blocks that are full by now into the prefix cache, and free those behind a window."""
        table = sequence.table
        hashes = sequence.hashes.upto(sequence.token_ids, sequence.num_computed)
        first = table.next_full // self._block_size - 1
        num_groups = self._num_groups
        for group in range(num_groups):
            blocks = table.blocks[first * num_groups + group : len(hashes) * num_groups : num_groups]
            for index in self._pool.cache(hashes[first:], blocks, group):
                self._pool.recorder.store(sequence, first + index, group)
        if self._windows:
            self._free_behind_windows(sequence)
        table.next_full = (len(hashes) + 1) * self._block_size
        self._states.settle(sequence)

    def decoded(self, sequences: Iterable[Sequence]) -> None:
        """A step that is planned decodes these sequences: order snapshots of their recurrent states."""
        self._states.decoded(sequences)

    def launched(self, sequence: Sequence, num_tokens: int) -> None:
        """A step that is planned computes ``num_tokens`` more of a prompt: order copies of its recurrent state."""
        self._states.launched(sequence, num_tokens)

    def take_state_orders(self, step: int) -> StateOrders:
        """Return what ``step``, which has been planned, stores and copies of recurrent states."""
        self._copies.planned(step)
        return self._states.take_orders(step)

    def applied(self, step: int) -> None:
        """``step`` has ended."""
        self._states.applied(step)
        self._copies.applied(step)

    def forget_cached(self) -> None:
        """Empty the prefix cache, and the tiers behind it."""
        self._connector.tiers.forget()
        self._states.pool.forget_cached()
        self._pool.forget_cached()  # last: records say that the whole cache is empty

    def received(self, sequence: Sequence, num_tokens: int) -> None:
        """All KV of a load is here, cached or read from a peer: that of the first ``num_tokens`` tokens."""
        if self._windows:
            table = sequence.table
            end = self._logical(num_tokens)
            table.covered = end * self._block_size
            table.ready = end * self._num_groups
            self._pool.drop(table.take_spare(), Use.HELD)
        sequence.set_computed(self._states.received(sequence, num_tokens))
        self.cache_full_blocks(sequence)

    def limit_ready_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Let steps use the blocks of the first ``num_tokens`` tokens only: a load fills those behind them."""
        sequence.table.ready = num_tokens // self._block_size * self._num_groups

    def make_all_blocks_ready(self, sequence: Sequence) -> None:
        """Let steps use all blocks of a sequence again."""
        sequence.table.ready = len(sequence.table.blocks)

    def set_aside(self, sequence: Sequence) -> None:
        """A waiting sequence is paused: keep no fetched blocks for it."""
        self._connector.tiers.end_fetch(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, except those that a transfer may still write to. No step may be in flight."""
        assert not sequence.in_flight, f"sequence {sequence.seq} frees blocks that a step still writes to"
        quarantined = self._connector.abandon(sequence)  # and the slot of a state
        table = sequence.table
        self._copies.cancel(table)
        blocks = _blocks_of(table.blocks) + table.spare if self._windows else table.blocks
        self._pool.drop([block for block in blocks if block not in quarantined], Use.HELD)
        table.clear()
        sequence.set_computed(0)
        self._states.free(sequence)

    def _find(self, sequence: Sequence) -> _Allocation | None:
        """Return the blocks and the state for a sequence; None if too few blocks or slots are free."""
        allocation = self._needed(sequence)
        lacks_slots = self._states.num_lacking(sequence, allocation.state_from) > 0
        return None if lacks_slots or self._shortage(allocation).missing > 0 else allocation

    def _needed(self, sequence: Sequence) -> _Allocation:
        """Return the blocks and the state that a sequence needs, free or not."""
        cached = self._pool.match(sequence.hashes.one_by_one(sequence.token_ids, sequence.reusable))
        num_matched = len(cached) // self._num_groups
        state_from = NO_SLOT
        if not self._connector.peers.loadable(sequence):  # a load brings the state
            hashes = sequence.hashes.upto(sequence.token_ids, num_matched * self._block_size)
            num_cached, state_from = self._states.find(hashes)
            cached = cached[: num_cached * self._num_groups]
        num_cached = len(cached) // self._num_groups
        needed = self._logical(len(sequence.token_ids))
        num_fresh = self._num_full * (needed - num_cached)
        covered = num_cached
        if self._windows and self._connector.peers.loadable(sequence):
            size = self._block_size
            rest = needed - num_cached
            num_fresh += sum(min(rest, window_blocks(window, size)) for _, window in self._windows)
        elif self._windows:
            covered = min(needed, num_cached + self._logical(self._max_batch_tokens))
            num_fresh += len(self._windows) * (covered - num_cached)
        return _Allocation(cached, num_fresh, covered, state_from, num_matched)

    def _shortage(self, allocation: _Allocation) -> Shortage:
        held = _blocks_of(allocation.cached) if self._windows else allocation.cached
        return Shortage(allocation.num_fresh - self.num_free + self._pool.count_free(held), held)

    def _slots_of(self, slot: int) -> tuple[int, ...]:
        return () if slot == NO_SLOT else (slot,)

    def _logical(self, num_tokens: int) -> int:
        """Return the logical blocks of ``num_tokens`` tokens: the blocks in each full group."""
        return -(-num_tokens // self._block_size)

    def _short(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int, int]]:
        """Return the sequences that lack blocks for their next token, with the ends that ``_grow_to`` takes.

        In full groups they get blocks for all of their tokens, in the others blocks for the next one, or for those of
        an image that a step computes together.
        """
        if not self._windows:
            return [
                (sequence, self._logical(sequence.length), 0)
                for sequence in sequences
                if sequence.length > sequence.table.capacity
            ]
        return [
            (sequence, self._logical(sequence.length), self._logical(sequence.num_launched + self._least(sequence)))
            for sequence in sequences
            if sequence.length > sequence.table.capacity
            or sequence.num_launched + self._least(sequence) > sequence.table.covered
        ]

    def _least(self, sequence: Sequence) -> int:
        """Return the fewest tokens that its next step computes."""
        images = sequence.request.images
        return tokens_to_end(images, sequence.num_launched) if images and self._whole_images else 1

    def _grow_to(self, ends: list[tuple[Sequence, int, int]]) -> bool:
        """Allocate logical blocks up to the first end in full groups, and up to the second one in the others.

        Return False, and allocate none, if too few are free.
        """
        counts = [self._num_missing(*end) for end in ends]
        blocks = self._pool.take(sum(counts), after=self._last_block(ends[0][0]))
        if blocks is None:
            return False
        fresh = iter(blocks)
        for sequence, end, covered in ends:
            self._add_blocks(sequence, fresh, end, covered)
        return True

    def _num_missing(self, sequence: Sequence, end: int, covered: int) -> int:
        missing = self._num_full * max(0, end - len(sequence.table.blocks) // self._num_groups)
        if self._windows:
            missing += len(self._windows) * max(0, covered - sequence.table.covered // self._block_size)
        return missing

    def _add_blocks(self, sequence: Sequence, fresh: Iterator[int], end: int, covered: int) -> None:
        """Give a sequence the blocks that ``_num_missing`` counts."""
        table = sequence.table
        held = len(table.blocks) // self._num_groups
        if not self._windows:
            table.add(islice(fresh, self._num_full * (end - held)), self._block_size, self._num_groups)
            return
        ready = table.ready
        begin = table.covered // self._block_size
        windows = self._groups.windows
        more = [NULL_BLOCK if window else next(fresh) for _ in range(held, end) for window in windows]
        table.add(more, self._block_size, self._num_groups)
        if covered > begin:
            ready = covered * self._num_groups
            num_windows = len(self._windows)
            blocks = list(islice(fresh, (covered - begin) * num_windows))
            for number, (group, _) in enumerate(self._windows):
                table.replace(begin * self._num_groups + group, blocks[number::num_windows], self._num_groups)
        table.covered = max(begin, covered) * self._block_size
        table.ready = ready

    def _last_block(self, sequence: Sequence) -> int | None:
        """Return a block after which to look for adjacent ones: that of the last logical block in the last group."""
        block = sequence.table.blocks[-1]
        return None if block == NULL_BLOCK else block

    def _free_behind_windows(self, sequence: Sequence) -> None:
        """Free the blocks that no later token sees, nor a token of a step in flight. Oldest first."""
        table = sequence.table
        behind: list[int] = []
        for number, (group, window) in enumerate(self._windows):
            begin = table.kept_from[number]
            end = first_block(sequence.num_computed, window, self._block_size)
            if end > begin:
                nulls = [NULL_BLOCK] * (end - begin)
                behind += table.replace(begin * self._num_groups + group, nulls, self._num_groups)
                table.kept_from[number] = end
        behind.reverse()  # ``drop`` begins with the last one
        self._pool.drop(_blocks_of(behind), Use.HELD, passed=True)


def _blocks_of(entries: Iterable[int]) -> list[int]:
    return [block for block in entries if block != NULL_BLOCK]
