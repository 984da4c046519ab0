"""The scheduler's side of the connector: orders for it, reads in flight, leases, and the blocks each of them holds.

On D, a block that a transfer may still write to is never anybody else's:

    reserved blocks ──start_read──► the transfer's ──ended──► the request's: confirm all, then use
                                        │
                                     abandon (request cancelled, given up)
                                        ▼
                                   quarantined ──ended──► free

Only the end of a transfer makes its blocks safe: releasing or disconnecting does not stop bytes from landing.

On P, the KV that a peer may read is never changed. A block is leased as soon as it is full, or the prompt has ended in
it, while its sequence goes on, and may add to that last one. The two claims are independent, and the block is free when
both are gone.

    sequence   held ─────────────────────────┤ ended
    peer             leased ─────────────────────────┤ free_lease
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache.block_pool import BlockPool, Use
from pdserve.records import KVConnectorPlan, KVRead, Peer


@dataclass(slots=True)
class ReadInFlight:
    """A read in flight, and the request it was ordered for."""

    rid: int
    epoch: str  # of the peer
    blocks: tuple[int, ...]
    abandoned: bool = False  # the request does not wait for it any more


class KVTransfers:
    """Numbers reads, knows whom each is for, and keeps blocks from reuse while a transfer needs them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reads: dict[int, ReadInFlight] = {}
        self._leases: dict[int, list[int]] = {}  # by rid
        self._connect: list[Peer] = []
        self._disconnect: list[str] = []
        self._orders: list[KVRead] = []
        self._next_id = 1

    # ------------------------------------------------------------ orders

    @property
    def has_orders(self) -> bool:
        return bool(self._connect or self._disconnect or self._orders)

    def connect(self, peer: Peer) -> None:
        self._connect.append(peer)

    def disconnect(self, epoch: str) -> None:
        self._disconnect.append(epoch)

    def take_orders(self) -> KVConnectorPlan:
        """All orders since the last call, for the connector to carry out with the next step."""
        orders = KVConnectorPlan(tuple(self._connect), tuple(self._disconnect), tuple(self._orders))
        self._connect.clear()
        self._disconnect.clear()
        self._orders.clear()
        return orders

    # ------------------------------------------------------------ reads

    def start_read(self, rid: int, epoch: str, local: tuple[int, ...], remote: tuple[int, ...]) -> int:
        """Order a read into held blocks ``local``; returns its number."""
        read = KVRead(read_id=self._next_id, epoch=epoch, local_blocks=local, remote_blocks=remote)
        self._next_id += 1
        self._reads[read.read_id] = ReadInFlight(rid, epoch, local)
        self._orders.append(read)
        return read.read_id

    def abandon(self, read_id: int) -> tuple[int, ...]:
        """Nobody waits for this read any more: its blocks go from held to quarantined. Returns them."""
        reading = self._reads[read_id]
        reading.abandoned = True
        self._pool.move(reading.blocks, Use.HELD, Use.QUARANTINED)
        return reading.blocks

    def ended(self, read_id: int) -> ReadInFlight:
        """No byte of it can land any more: frees its blocks where it was abandoned."""
        reading = self._reads.pop(read_id)
        if reading.abandoned:
            self._pool.drop(reading.blocks, Use.QUARANTINED)
        return reading

    # ------------------------------------------------------------ leases

    def lease(self, rid: int, blocks: list[int]) -> None:
        """A peer may read these held blocks, too, from now on."""
        self._pool.lease(blocks)
        self._leases.setdefault(rid, []).extend(blocks)

    def free_lease(self, rid: int) -> None:
        """No peer reads them any more. Unknown leases are ignored."""
        self._pool.drop(self._leases.pop(rid, []), Use.LEASED)
