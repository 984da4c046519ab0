"""Loads from peers on D, and leases to peers on P.

On D, a block that an unfinished transfer may write to is never handed out:

    held ──start_read──► the transfer's ──ended──► the request's: use it once everything is confirmed
                             │
                          abandon_load (request cancelled or given up)
                             ▼
                        quarantined ──ended──► free

Only the end of a transfer makes its blocks safe: releasing or disconnecting does not stop bytes from landing.

On P, KV that a peer may read never changes. A block is leased as soon as it is full or its prompt has ended, while its
sequence continues and may add to the last block. The two claims are independent; the block is free when both ended.

    sequence   held ─────────────────────────┤ ended
    peer             leased ─────────────────────────┤ free_lease

In a pull, a peer reads blocks of the prefix cache. They are leased at once, and no sequence takes part. While requests
of this node lack blocks, the engine asks the frontend to revoke such leases. Only the frontend ends leases, since it
tells readers whether they stood. So its FreeLease frees the blocks, as after any other end.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from engine.kv_cache.block_pool import Use
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.peer_kv import PeerKV
from engine.kv_cache.revocation import FindLacking
from engine.sequence import Sequence
from engine.step_cost_meter import LineFit
from pdserve.errors import ConfigError
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.messages import LeaseCached, Leased, ReadChecked, ReadEnded, StartRead
from pdserve.kv.groups import Pair
from pdserve.kv.states import NO_SLOT
from pdserve.records import KVConnectorOrders, KVRead, ModelRunnerOutput, Peer, ReadResult
from pdserve.request_cost import HANDOFF_SECONDS, LinearCost

_KEEP = 0.98  # weight of earlier reads after each new one: about 50 reads count


@dataclass(slots=True)
class _Load:
    """A request on D whose prompt comes from a peer."""

    sequence: Sequence
    first: int  # first block that it brings: earlier ones are cached here, or computed
    num_announced: int  # leading blocks of the prompt that are ordered, or lie before the first one
    reads: set[int] = field(default_factory=set)  # in flight
    has_state: bool = False  # a read brings the recurrent state
    computed_at: float | None = None  # end of the peer's last chunk; None: it has not begun


@dataclass(slots=True)
class _Read:
    """A read in flight. ``load`` is None once its request has abandoned it."""

    message: StartRead
    order: KVRead
    pairs: list[Pair]  # logical block and group of each block
    load: _Load | None

    @property
    def num_blocks(self) -> int:
        """Logical blocks."""
        return self.pairs[-1][0] - self.pairs[0][0] + 1


@dataclass(slots=True)
class _Lease:
    num_announced: int  # leading blocks of the prompt: skipped by the peer, or leased to it
    num_digested: int  # leading blocks of the prompt: skipped, or with digests computed or ordered
    blocks: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)  # digests of unannounced blocks, and of the state
    state_slot: int = NO_SLOT


class ConnectedPeers(PeerKV):
    """Reads from peers on D and leases to peers on P.

    With ``checksum``, P announces a digest of each block, and D compares them with digests of the blocks that it read:

        P   step that fills blocks ──with its output──► their digests ──► Leased, with digests ──frontend──► D
            LeaseCached ──► their digests, beside steps ──► the same
        D   ReadEnded ──► digests of what was read, beside steps ──► ReadChecked
    """

    def __init__(self, parts: CacheParts, *, checksum: bool = False, num_layers: int = 0) -> None:
        """``num_layers``: layers with a KV cache, including those that make drafts; 0: all peers have as many."""
        self._pool = parts.pool
        self._events = parts.events
        self._block_size = parts.block_size
        self._states = parts.states
        self._groups = parts.pool.groups
        self._digests = parts.digests
        self._checksum = checksum
        self._num_layers = num_layers
        self._layers_of: dict[str, int] = {}  # layers of each connected peer, by epoch
        self._cost = LineFit(_KEEP)
        self._handoffs = LineFit(_KEEP, flat=True)  # seconds from the peer's last chunk to confirmed KV
        self._loads: dict[int, _Load] = {}  # by rid
        self._reads: dict[int, _Read] = {}  # by read id
        self._leases: dict[int, _Lease] = {}  # by rid
        self._revocable: dict[int, _Lease] = {}  # leases of pulls, oldest first; also in ``_leases``
        self._revoking: set[int] = set()  # rids
        self._started: list[int] = []
        self._last_chunks: list[int] = []
        self._connect: list[Peer] = []
        self._disconnect: list[str] = []
        self._reads_ordered: list[KVRead] = []
        self._next_id = 1

    def loadable(self, sequence: Sequence) -> int:
        return sequence.load_len if sequence.request.mode.loads else 0

    @property
    def load_cost(self) -> LinearCost:
        return self._cost.line

    # ------------------------------------------------------------ loads on D

    def connect(self, peer: Peer) -> None:
        try:
            parts = [rank.part.usable(peer.other_drafts) for rank in peer.ranks]
        except ConfigError as exc:  # a layout without layers or heads
            self._events.failed_peers.append((peer.epoch, f"the peer's KV: {exc}"))
            return
        self._connect.append(peer)
        self._layers_of[peer.epoch] = max((part.total_layers for part in parts if part is not None), default=0)

    def disconnect(self, epoch: str) -> None:
        self._disconnect.append(epoch)
        self._layers_of.pop(epoch, None)

    def load(self, sequence: Sequence) -> None:
        first = sequence.num_computed // self._block_size
        self._loads[sequence.rid] = _Load(sequence, first, first)

    def load_behind(self, sequence: Sequence, num_tokens: int) -> None:
        load = self._loads[sequence.rid]
        assert load.num_announced == load.first, "a read was ordered"
        assert not num_tokens % self._block_size
        load.first = load.num_announced = num_tokens // self._block_size

    def reading(self, sequence: Sequence) -> bool:
        load = self._loads.get(sequence.rid)
        return load is not None and bool(load.reads)

    def start_read(self, message: StartRead) -> None:
        load = self._loads.get(message.rid)
        if load is None:
            return
        end = self._num_blocks(message.num_tokens)
        sequence = load.sequence
        position = message.num_tokens if message.pull else sequence.load_len - 1
        pairs = self._pairs(load.num_announced, end, position)
        problem = self._check_announcement(message, sequence, pairs)
        read_id = self._next_id
        self._next_id += 1
        if problem:
            self._events.reads.append(ReadEnded(message.rid, message.epoch, ReadResult(read_id, problem)))
            return
        self._place_windows(sequence, pairs)
        blocks = tuple(self._entries(sequence.table.blocks, pairs))
        if self._layers_of.get(message.epoch, self._num_layers) < self._num_layers:
            sequence.request.lacks_draft_kv = True
        local_state = NO_SLOT
        if message.remote_state != NO_SLOT:
            assert sequence.state is not None
            load.has_state = True
            local_state = sequence.state.slot
        order = KVRead(
            read_id,
            message.epoch,
            blocks,
            message.remote_blocks,
            self._groups_of(pairs),
            local_state,
            message.remote_state,
        )
        load.num_announced = end
        load.reads.add(order.read_id)
        self._reads[order.read_id] = _Read(message, order, pairs, load)
        self._reads_ordered.append(order)
        self._started.append(message.rid)

    def handoff_ends(self, rid: int, at: float) -> None:
        if rid in self._loads:
            self._loads[rid].computed_at = at

    @property
    def arrivals(self) -> Iterable[float]:
        seconds = self._handoffs.line.base if self._handoffs else HANDOFF_SECONDS
        return (load.computed_at + seconds for load in self._loads.values() if load.computed_at is not None)

    @property
    def loads(self) -> bool:
        return bool(self._loads)

    def take_started(self) -> Collection[int]:
        started = self._started
        self._started = []
        return started

    def finish_load(self, sequence: Sequence, num_tokens: int, at: float) -> bool:
        load = self._loads.pop(sequence.rid)
        if load.computed_at is not None:
            self._handoffs.add(0.0, max(0.0, at - load.computed_at))
        assert not load.reads, "KV was confirmed before all reads had ended"
        if sequence.state is not None and not load.has_state:
            return False
        announced = max(self._num_blocks(num_tokens), load.first)
        assert load.num_announced == announced, "KV was confirmed that was not read"
        return True

    def abandon_load(self, sequence: Sequence) -> Collection[int]:
        load = self._loads.pop(sequence.rid, None)
        quarantined: set[int] = set()
        for read_id in load.reads if load is not None else ():
            read = self._reads[read_id]
            read.load = None
            self._pool.move(read.order.local_blocks, Use.HELD, Use.QUARANTINED)
            quarantined.update(read.order.local_blocks)
            if read.order.local_state != NO_SLOT:
                assert sequence.state is not None
                self._states.pool.move((read.order.local_state,), Use.HELD, Use.QUARANTINED)
                sequence.state.give_up_slot()
        return quarantined

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _pairs(self, start: int, end: int, position: int) -> list[Pair]:
        """Return the logical blocks and groups that are handed off, as ``KVCacheGroups.pairs`` defines them."""
        return self._groups.pairs(start, end, position, self._block_size)

    def _entries(self, blocks: list[int], pairs: Iterable[Pair]) -> list[int]:
        """Return the blocks of these pairs in a sequence's list."""
        num_groups = self._groups.num_groups
        return [blocks[index * num_groups + group] for index, group in pairs]

    def _groups_of(self, pairs: Iterable[Pair]) -> tuple[int, ...]:
        return tuple(group for _, group in pairs) if self._groups.num_groups > 1 else ()

    def _place_windows(self, sequence: Sequence, pairs: Iterable[Pair]) -> None:
        """Put spare blocks where a load needs them in groups with a window."""
        for index, group in pairs:
            if self._groups.windows[group] is not None:
                sequence.table.use_spare(index * self._groups.num_groups + group)

    def _states_of(self, slot: int) -> tuple[int, ...]:
        return () if slot == NO_SLOT else (slot,)

    def _check_announcement(self, message: StartRead, sequence: Sequence, pairs: list[Pair]) -> str:
        """Return why a peer's announcement of blocks is wrong, or an empty string. It must name ``pairs``."""
        num_tokens = message.num_tokens
        num_blocks = len(message.remote_blocks)
        load_len = sequence.load_len
        num_missing = len(pairs)
        if num_tokens > load_len or (num_tokens % self._block_size and num_tokens != load_len):
            return f"the peer named blocks up to token {num_tokens} of a prompt of {load_len}"
        if not num_blocks or num_blocks != num_missing:
            return f"the peer named {num_blocks} blocks where {num_missing} are missing"
        if sum(self._groups.windows[group] is not None for _, group in pairs) > len(sequence.table.spare):
            return "the peer named blocks of windows after those of a pull that ends earlier"
        has_state = message.remote_state != NO_SLOT
        if (num_tokens == load_len and not has_state) if self._states.recurrent else has_state:
            return f"the peer named {'a' if has_state else 'no'} recurrent state up to token {num_tokens} of {load_len}"
        if len(message.digests) != (num_blocks + has_state if self._checksum else 0):
            return f"the peer named {num_blocks} blocks with {len(message.digests)} digests"
        return ""

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        return bool(self._connect or self._disconnect or self._reads_ordered)

    def add_orders(self, orders: KVConnectorOrders) -> KVConnectorOrders:
        if not self.has_orders:
            return orders
        connect = tuple(self._connect)
        disconnect = tuple(self._disconnect)
        reads = tuple(self._reads_ordered)
        self._connect.clear()
        self._disconnect.clear()
        self._reads_ordered.clear()
        return msgspec.structs.replace(orders, connect=connect, disconnect=disconnect, reads=reads)

    def update(self, output: ModelRunnerOutput) -> None:
        self._end_reads(output.connector.finished_recving)
        self._events.connected += output.connector.connected
        self._events.failed_peers += output.connector.failed_peers

    def _end_reads(self, results: Iterable[ReadResult]) -> None:
        """Report reads, order their digests, and free the blocks of abandoned ones."""
        for result in results:
            read = self._reads.pop(result.read_id)
            blocks = read.order.local_blocks
            if not result.error:
                self._cost.add(read.num_blocks * self._block_size, result.seconds)
            if read.load is None:
                self._pool.drop(blocks, Use.QUARANTINED)
                if read.order.local_state != NO_SLOT:
                    self._states.pool.drop((read.order.local_state,), Use.QUARANTINED)
            else:
                read.load.reads.discard(result.read_id)
            self._events.reads.append(ReadEnded(read.message.rid, read.order.epoch, result))
            if self._checksum and read.load is not None and not result.error:
                groups = read.order.groups
                num_tokens = read.message.num_tokens
                states = self._states_of(read.order.local_state)
                common = self._common_layers(self._layers_of.get(read.order.epoch, 0))
                self._digests.add(blocks, groups, num_tokens, partial(self._compare, read), states, num_layers=common)

    def _compare(self, read: _Read, digests: tuple[int, ...]) -> None:
        """Compare the digests of a read with the announced ones. Ignore those of ended requests."""
        rid = read.message.rid
        expected = read.message.digests
        text = ""
        if self._loads.get(rid) is not read.load:
            return
        corrupt = [index for index, digest in enumerate(digests) if digest != expected[index]]
        if corrupt:
            index = corrupt[0]
            if index < len(read.pairs):
                block, group = read.pairs[index]
                of_group = f" in KV cache group {group}" if read.order.groups else ""
                name = f"block {block} of the prompt{of_group}, {read.order.remote_blocks[index]} at the peer,"
            else:
                name = f"the recurrent state, in slot {read.order.remote_state} at the peer,"
            text = (
                f"checksum of {len(corrupt)} of {len(digests)} blocks differs: {name} was announced with "
                f"{expected[index] % 2**64:#018x} and arrived with {digests[index] % 2**64:#018x}"
            )
        self._events.checked.append(ReadChecked(rid, read.order.epoch, len(corrupt), text))

    # ------------------------------------------------------------ leases on P

    def scheduled(self, sequence: Sequence) -> None:
        """Note the last chunk of a peer's prompt, and order the digests of the blocks that this step fills for it."""
        if sequence.for_peer and sequence.num_launched >= sequence.prompt_len:
            self._last_chunks.append(sequence.rid)
        if not (self._checksum and sequence.for_peer):
            return
        lease = self._lease(sequence)
        start = lease.num_digested
        end, num_tokens = self._leasable(sequence, sequence.num_launched)
        if end > start:
            lease.num_digested = end
            pairs = self._pairs(start, end, sequence.prompt_len - 1)
            blocks = tuple(self._entries(sequence.table.blocks, pairs))
            ends = sequence.state is not None and num_tokens == sequence.prompt_len
            states = self._states_of(sequence.state.lease_slot if sequence.state is not None and ends else NO_SLOT)
            if blocks:
                self._digests.add_to_step(
                    blocks,
                    self._groups_of(pairs),
                    num_tokens,
                    lease.digests.extend,
                    states,
                    num_layers=self._common_layers(sequence.request.kv_layers),
                )

    def take_last_chunks(self) -> Collection[int]:
        last = self._last_chunks
        self._last_chunks = []
        return last

    def computed(self, sequence: Sequence) -> None:
        """Lease the full blocks that the peer lacks, and with the end of the prompt its last block; announce them."""
        if not sequence.for_peer:
            return
        lease = self._lease(sequence)
        start = lease.num_announced
        end, num_tokens = self._leasable(sequence, sequence.num_computed)
        blocks = self._entries(sequence.table.blocks, self._pairs(start, end, sequence.prompt_len - 1))
        if not blocks:  # or all are behind windows
            return
        self._pool.lease(blocks)
        lease.num_announced = end
        lease.blocks += blocks
        last = num_tokens == sequence.prompt_len
        if last:
            lease.state_slot = self._states.take_lease(sequence)
        num_digests = len(blocks) + (lease.state_slot != NO_SLOT)
        digests = tuple(lease.digests[:num_digests])
        del lease.digests[:num_digests]
        leased = Leased(sequence.rid, tuple(blocks), num_tokens, last, digests, lease.state_slot)
        self._events.leased.append(leased)

    def lease_cached(self, message: LeaseCached) -> None:
        token_ids = array("I", message.token_ids)
        root = root_hash(message.cache_salt, message.adapter)
        hashes = BlockHashes(self._block_size, root, images=message.images)
        cached = self._pool.match(hashes.one_by_one(token_ids, len(token_ids)))
        skipped = message.skip_tokens // self._block_size
        end = len(cached) // self._groups.num_groups
        end, state_slot = self._states.find(hashes.upto(token_ids, end * self._block_size))
        num_tokens = end * self._block_size
        pairs = self._pairs(skipped, end, num_tokens)
        lease = self._leases[message.rid] = _Lease(end, end, blocks=self._entries(cached, pairs))
        self._pool.lease(lease.blocks)
        if lease.blocks and state_slot != NO_SLOT:
            lease.state_slot = state_slot
            self._states.pool.lease((state_slot,))
        if lease.blocks:
            self._revocable[message.rid] = lease

        def announce(digests: tuple[int, ...]) -> None:
            if self._leases.get(message.rid) is lease:  # else it has ended
                leased = Leased(message.rid, tuple(lease.blocks), num_tokens, True, digests, lease.state_slot)
                self._events.leased.append(leased)

        if self._checksum and lease.blocks:
            states = self._states_of(lease.state_slot)
            common = self._common_layers(message.kv_layers)
            self._digests.add(
                tuple(lease.blocks), self._groups_of(pairs), num_tokens, announce, states, num_layers=common
            )
        else:
            announce(())

    def revoke(self, lacking: FindLacking) -> bool:
        if self._revocable and not self._revoking:
            youngest_first = [*reversed(self._revocable.items())]
            blocks, slots = lacking()
            chosen = blocks.chosen(self._pool, ((rid, lease.blocks) for rid, lease in youngest_first))
            leased = ((rid, self._states_of(lease.state_slot)) for rid, lease in youngest_first)
            with_slots = slots.chosen(self._states.pool, leased)
            if chosen is not None and with_slots is not None:
                self._revoking.update(chosen, with_slots)
                self._events.revoke += self._revoking
                for rid in self._revoking:
                    del self._revocable[rid]
        return self.revoking

    @property
    def revoking(self) -> bool:
        return bool(self._revoking)

    def free_lease(self, rid: int) -> None:
        self._revocable.pop(rid, None)
        self._revoking.discard(rid)
        lease = self._leases.pop(rid, None)
        if lease is not None:
            self._pool.drop(lease.blocks, Use.LEASED)
            if lease.state_slot != NO_SLOT:
                self._states.pool.drop((lease.state_slot,), Use.LEASED)

    def _common_layers(self, of_peer: int) -> int:
        """Return how many layers this node and a peer have, both with the KV of layers that make drafts if possible."""
        return min(self._num_layers, of_peer) if self._num_layers and of_peer else 0

    def _lease(self, sequence: Sequence) -> _Lease:
        skipped = sequence.request.skip_tokens // self._block_size
        return self._leases.setdefault(sequence.rid, _Lease(skipped, skipped))

    def _leasable(self, sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Return how many blocks a peer may read after ``num_tokens``, and how many of the tokens the blocks hold."""
        if num_tokens >= sequence.prompt_len:
            return self._num_blocks(sequence.prompt_len), sequence.prompt_len
        full = num_tokens // self._block_size
        return full, full * self._block_size
