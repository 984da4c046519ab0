"""Scheduler side of the KV connector: a pdserve.protocols.KVConnectorScheduler for peers, and one for no connector.

It lives in the engine, not in connector/: it decides who may use a block, and the block pool has one owner. A further
tier (host memory, disk) is another class like PeerConnectorScheduler.

On D, a block that an unfinished transfer may write to is never handed out:

    held ──start_read──► the transfer's ──ended──► the request's: use it once everything is confirmed
                             │
                          abandon_load (request cancelled or given up)
                             ▼
                        quarantined ──ended──► free

Only the end of a transfer makes its blocks safe: releasing or disconnecting does not stop bytes from landing.

On P, KV that a peer may read never changes. A block is leased as soon as it is full or its prompt has ended, while its
sequence goes on and may add to the last block. The two claims are independent; the block is free when both have ended.

    sequence   held ─────────────────────────┤ ended
    peer             leased ─────────────────────────┤ free_lease
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from engine.ipc.event_batch import EventBatch
from engine.ipc.messages import Leased, ReadEnded, Reserved
from engine.kv_cache.block_digests import BlockDigests
from engine.kv_cache.block_pool import BlockPool, Use
from engine.throughput_meter import LineFit
from pdserve.protocols import KVSequence
from pdserve.records import NO_ORDERS, DigestOrder, KVConnectorPlan, KVRead, ModelRunnerOutput, Peer, ReadResult
from pdserve.throughput import LinearCost

_KEEP = 0.98  # weight of earlier reads after each new one: about 50 reads count


class NullConnectorScheduler:
    """No connector: nothing can be loaded and nothing is kept. KV events of the prefix cache still reach routers."""

    def __init__(self, pool: BlockPool, events: EventBatch, block_size: int) -> None:
        self._pool = pool

    def loadable(self, sequence: KVSequence) -> int:
        return 0

    @property
    def load_cost(self) -> LinearCost:
        return LinearCost()

    def connect(self, peer: Peer) -> None:
        """There is nothing to connect with."""

    def disconnect(self, epoch: str) -> None:
        """There are no connections."""

    def load(self, sequence: KVSequence) -> None:
        raise AssertionError("a load without loadable tokens")

    def start_read(
        self, rid: int, epoch: str, remote_blocks: tuple[int, ...], num_tokens: int, digests: tuple[int, ...]
    ) -> None:
        """There is no load."""

    def finish_load(self, sequence: KVSequence) -> None:
        raise AssertionError("the end of a load that never began")

    def abandon_load(self, sequence: KVSequence) -> Collection[int]:
        return ()

    def take_started(self) -> Collection[int]:
        return ()

    @property
    def has_orders(self) -> bool:
        return False

    def take_orders(self) -> KVConnectorPlan:
        return NO_ORDERS

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        return ()

    def update(self, output: ModelRunnerOutput) -> None:
        """Nothing was ordered."""

    def computed(self, sequence: KVSequence) -> None:
        """Nothing is kept."""

    def free_lease(self, rid: int) -> None:
        """There are no leases."""

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        return self._pool.events.take()


@dataclass(slots=True)
class _Load:
    """A request on D whose prompt comes from a peer."""

    sequence: KVSequence
    num_announced: int  # leading blocks of the prompt: cached here, or ordered
    reads: set[int] = field(default_factory=set)  # in flight


@dataclass(slots=True)
class _Read:
    """A read in flight. ``load`` is None once its request has abandoned it."""

    rid: int
    load: _Load | None
    order: KVRead
    num_tokens: int  # of the prompt, up to the end of these blocks
    digests: tuple[int, ...]  # announced by the peer; empty without checksums


@dataclass(slots=True)
class _Lease:
    num_announced: int  # leading blocks of the prompt: skipped by the peer, or leased to it
    blocks: list[int] = field(default_factory=list)


class PeerConnectorScheduler:
    """Reads from peers on D and leases to peers on P.

    With ``checksum``, P announces a digest of each block, and D reports a read as good only if its digests are equal.
    """

    def __init__(self, pool: BlockPool, events: EventBatch, block_size: int, *, checksum: bool = False) -> None:
        self._pool = pool
        self._events = events
        self._block_size = block_size
        self._digests = BlockDigests(block_size) if checksum else None
        self._cost = LineFit(_KEEP)
        self._loads: dict[int, _Load] = {}  # by rid
        self._reads: dict[int, _Read] = {}  # by read id
        self._leases: dict[int, _Lease] = {}  # by rid
        self._started: list[int] = []
        self._connect: list[Peer] = []
        self._disconnect: list[str] = []
        self._orders: list[KVRead] = []
        self._next_id = 1

    # ------------------------------------------------------------ what can be loaded, at what cost

    def loadable(self, sequence: KVSequence) -> int:
        return sequence.prompt_len if sequence.from_peer else 0

    @property
    def load_cost(self) -> LinearCost:
        return self._cost.line

    # ------------------------------------------------------------ loads on D

    def connect(self, peer: Peer) -> None:
        self._connect.append(peer)

    def disconnect(self, epoch: str) -> None:
        self._disconnect.append(epoch)

    def load(self, sequence: KVSequence) -> None:
        self._loads[sequence.rid] = _Load(sequence, sequence.num_computed // self._block_size)
        self._events.reserved.append(Reserved(sequence.rid, sequence.num_computed))

    def start_read(
        self, rid: int, epoch: str, remote_blocks: tuple[int, ...], num_tokens: int, digests: tuple[int, ...]
    ) -> None:
        load = self._loads.get(rid)
        if load is None:
            return
        start, end = load.num_announced, -(-num_tokens // self._block_size)
        order = KVRead(self._next_id, epoch, tuple(load.sequence.blocks[start:end]), remote_blocks)
        read = _Read(rid, load, order, num_tokens, digests)
        problem = self._check_announcement(read, load.sequence.prompt_len, end - start)
        if problem:
            self._events.reads.append(ReadEnded(rid, problem, epoch=epoch))
            return
        self._next_id += 1
        load.num_announced = end
        load.reads.add(order.read_id)
        self._reads[order.read_id] = read
        self._orders.append(order)
        self._started.append(rid)

    def finish_load(self, sequence: KVSequence) -> None:
        load = self._loads.pop(sequence.rid)
        assert not load.reads, "KV was confirmed before all reads had ended"
        assert load.num_announced == -(-sequence.prompt_len // self._block_size), "KV was confirmed before all was read"

    def abandon_load(self, sequence: KVSequence) -> Collection[int]:
        load = self._loads.pop(sequence.rid, None)
        quarantined: set[int] = set()
        for read_id in load.reads if load is not None else ():
            read = self._reads[read_id]
            read.load = None
            self._pool.move(read.order.local_blocks, Use.HELD, Use.QUARANTINED)
            quarantined.update(read.order.local_blocks)
        return quarantined

    def take_started(self) -> Collection[int]:
        started, self._started = self._started, []
        return started

    def _check_announcement(self, read: _Read, prompt_len: int, num_missing: int) -> str:
        """Return why a peer's announcement of blocks is wrong, or an empty string."""
        num_tokens, num_blocks = read.num_tokens, len(read.order.remote_blocks)
        if num_tokens > prompt_len or (num_tokens % self._block_size and num_tokens != prompt_len):
            return f"the peer named blocks up to token {num_tokens} of a prompt of {prompt_len}"
        if not num_blocks or num_blocks != num_missing:
            return f"the peer named {num_blocks} blocks where {num_missing} are missing"
        if self._digests is not None and len(read.digests) != num_blocks:
            return f"the peer named {num_blocks} blocks with {len(read.digests)} digests"
        return ""

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        digests = self._digests is not None and self._digests.has_orders
        return bool(self._connect or self._disconnect or self._orders or digests)

    def take_orders(self) -> KVConnectorPlan:
        if not (self._connect or self._disconnect or self._orders):
            return NO_ORDERS
        orders = KVConnectorPlan(tuple(self._connect), tuple(self._disconnect), tuple(self._orders))
        self._connect, self._disconnect, self._orders = [], [], []
        return orders

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        return self._digests.take_orders() if self._digests is not None else ()

    def update(self, output: ModelRunnerOutput) -> None:
        if self._digests is not None:
            self._digests.arrived(output.step.digests)
        self._end_reads(output.connector.finished_recving)
        self._events.connected += output.connector.connected
        self._events.failed_peers += output.connector.failed_peers

    def _end_reads(self, results: Iterable[ReadResult]) -> None:
        """Free the blocks of abandoned reads; report the others, once their digests are checked."""
        for result in results:
            read = self._reads.pop(result.read_id)
            sizes = (result.num_bytes, result.num_descriptors, result.seconds)
            ended = ReadEnded(read.rid, result.error, *sizes, epoch=read.order.epoch)
            if not result.error:
                self._cost.add(len(read.order.local_blocks) * self._block_size, result.seconds)
            if read.load is None:
                self._pool.drop(read.order.local_blocks, Use.QUARANTINED)
            else:
                read.load.reads.discard(result.read_id)
            if self._digests is None or read.load is None or result.error:
                self._events.reads.append(ended)
            else:
                compare = partial(self._compare, read, ended)
                self._digests.order(read.order.local_blocks, read.num_tokens, compare)

    def _compare(self, read: _Read, ended: ReadEnded, found: tuple[int, ...]) -> None:
        """Compare the digests of a read with the announced ones. After the request has ended, they mean nothing."""
        corrupt = [index for index, digest in enumerate(found) if digest != read.digests[index]]
        if corrupt and self._loads.get(read.rid) is read.load:
            index = corrupt[0]
            block = -(-read.num_tokens // self._block_size) - len(found) + index
            announced, arrived = read.digests[index] % 2**64, found[index] % 2**64
            text = (
                f"checksum of {len(corrupt)} of {len(found)} blocks differs: block {block} of the prompt, "
                f"{read.order.remote_blocks[index]} at the peer, was announced with {announced:#018x} and arrived with "
                f"{arrived:#018x}"
            )
            ended = msgspec.structs.replace(ended, error=text, num_corrupt=len(corrupt))
        self._events.reads.append(ended)

    # ------------------------------------------------------------ leases on P

    def computed(self, sequence: KVSequence) -> None:
        """Lease the full blocks that the peer lacks, and with the end of the prompt its last block; announce them."""
        if not sequence.for_peer:
            return
        size, lease = self._block_size, self._leases.get(sequence.rid)
        start = lease.num_announced if lease is not None else sequence.skip_tokens // size
        complete = sequence.num_computed >= sequence.prompt_len
        end = -(-sequence.prompt_len // size) if complete else sequence.num_computed // size
        if end <= start:
            return
        blocks = sequence.blocks[start:end]
        self._pool.lease(blocks)
        lease = self._leases.setdefault(sequence.rid, _Lease(start))
        lease.num_announced = end
        lease.blocks += blocks
        leased = Leased(sequence.rid, tuple(blocks), sequence.prompt_len if complete else end * size)
        if self._digests is None:
            self._events.leased.append(leased)
        else:
            self._digests.order(blocks, leased.num_tokens, partial(self._announce, leased))

    def free_lease(self, rid: int) -> None:
        lease = self._leases.pop(rid, None)
        if lease is not None:
            self._pool.drop(lease.blocks, Use.LEASED)

    def _announce(self, leased: Leased, digests: tuple[int, ...]) -> None:
        # A lease that has ended meanwhile is announced, too, as without digests: the front waits for the last part.
        self._events.leased.append(msgspec.structs.replace(leased, digests=digests))

    # ------------------------------------------------------------ KV events

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        return self._pool.events.take()
