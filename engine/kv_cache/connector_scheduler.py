"""Scheduler side of the KV connector: peers and tiers beside each other, and what both need.

It decides on plain values, without a device or I/O. It lives in the engine, not in connector/: it decides who may use a
block, and the block pool has one owner.

    peers     what other nodes give and take (peer_kv.py, engine/peers/)
    tiers     host memory and disk behind the prefix cache (tiers.py, engine/tiers/)
    report    what the frontend learns of the prefix cache (cache_report.py)

| vLLM's scheduler side          | here                                                                     |
|--------------------------------|--------------------------------------------------------------------------|
| get_num_new_matched_tokens     | ``peers.loadable``; ``tiers.fetch``, and then the prefix cache has them  |
| update_state_after_alloc       | ``peers.load``, ``peers.start_read``                                     |
| build_connector_meta           | ``take_orders``, ``take_digest_orders``                                  |
| update_connector_output        | ``update``                                                               |
| request_finished               | ``peers.computed`` leases each block once it is full; ``free_lease``     |
| take_events                    | ``report.take``                                                          |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import msgspec

from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.peer_kv import PeerKV
from engine.kv_cache.tiers import Tiers
from engine.sequence import Sequence
from pdserve.ipc.messages import LeaseCached
from pdserve.records import DigestOrder, KVConnectorOrders, ModelRunnerOutput


class KVConnectorScheduler:
    """By default that of a node without connector and tiers."""

    def __init__(self, parts: CacheParts, peers: PeerKV | None = None, tiers: Tiers | None = None) -> None:
        self.peers = peers or PeerKV()
        self.tiers = tiers or Tiers()
        self.report = parts.report
        self._digests = parts.digests

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the worker sides, or for the next step."""
        digests = self._digests
        return digests.any_beside or digests.any_of_step or self.peers.has_orders or self.tiers.has_orders

    def take_orders(self) -> KVConnectorOrders:
        """Return the orders since the last call, for the worker side of every rank; ``NO_ORDERS`` if there are none."""
        orders = self.peers.add_orders(self.tiers.take_orders())
        if self._digests.any_beside:  # tiers may have ordered some just now
            orders = msgspec.structs.replace(orders, digests=self._digests.take_beside())
        return orders

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        """Return the digests that the next step has to compute."""
        return self._digests.take_of_step()

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the digests and the connector output of a step, before the step's samples."""
        self._digests.update(output)
        self.peers.update(output)
        self.tiers.update(output)

    def lease_cached(self, message: LeaseCached) -> None:
        """Lease the cached blocks of a prompt to a peer, including blocks in tiers, and announce them."""
        lease = partial(self.peers.lease_cached, message)
        if not self.tiers.fetch_for_peer(message, lease):
            lease()

    def free_lease(self, rid: int) -> None:
        """Stop keeping the blocks of a request for its peer. Unknown rids are ignored."""
        self.tiers.end_pull(rid)
        self.peers.free_lease(rid)

    def abandon(self, sequence: Sequence) -> Collection[int]:
        """End the load and the fetch of a sequence, before it frees its blocks; see ``PeerKV.abandon_load``."""
        self.tiers.end_fetch(sequence)
        return self.peers.abandon_load(sequence)


ConnectorFactory = Callable[[CacheParts], KVConnectorScheduler]
