"""Tiers behind the prefix cache, as the core sees them.

A *fetch* brings cached blocks back into the prefix cache, before their sequence is admitted. It is ordered here and
executed by the worker sides.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sequence import Sequence
from pdserve.ipc.messages import LeaseCached
from pdserve.records import NO_ORDERS, KVConnectorOrders, ModelRunnerOutput


class Tiers:
    """The interface, and a node without tiers."""

    @property
    def fetches(self) -> bool:
        """Whether there is a tier to fetch from."""
        return False

    def considered(self, sequence: Sequence) -> bool:
        """Whether ``fetch`` has decided about a waiting sequence."""
        return True

    def fetch(self, sequence: Sequence) -> bool:
        """Begin to bring back cached blocks of a waiting sequence, if that is faster than to compute them.

        The first call decides. Return whether the sequence waits for a fetch now.
        """
        return False

    def fetching(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for a fetch: it is not admitted before."""
        return False

    def end_fetch(self, sequence: Sequence) -> None:
        """A sequence has got its blocks, or does not wait for them any more: keep none for it."""

    def fetch_for_peer(self, message: LeaseCached, answer: Callable[[], None]) -> bool:
        """Begin to bring back the blocks that a peer pulls, and call ``answer`` at the end.

        Return False, and call nothing, if there is nothing to bring or too little room.
        """
        return False

    def end_pull(self, rid: int) -> None:
        """A pull has ended: do not answer it any more. Unknown rids are ignored."""

    def give_way(self) -> bool:
        """Blocks are lacking: keep none for waiting sequences. Return whether any were kept."""
        return False

    @property
    def copying(self) -> bool:
        """Whether blocks cannot be allocated for now, because they are copied from or to a tier."""
        return False

    def forget(self) -> None:
        """Empty the tiers, as the prefix cache is emptied."""

    def use_weights(self, version: str) -> None:
        """Keep KV from now on with that of other nodes of this version, which no other weights or layouts have.

        Called once, and again after ``forget``.
        """

    @property
    def host_blocks(self) -> tuple[int, int]:
        """Blocks of host memory that are free, and that have cached KV."""
        return 0, 0

    @property
    def disk_blocks(self) -> int:
        """Blocks on disk."""
        return 0

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the worker sides."""
        return False

    def take_orders(self) -> KVConnectorOrders:
        """Return the orders since the last call. Digests of blocks may be ordered here."""
        return NO_ORDERS

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the ends of copies, reads and writes."""
