"""KV that peers give and take: which prompts can be loaded, what to read for them, what to keep for a peer's read.

A *load* brings the KV of a prompt from a peer into the blocks of its sequence. A *lease* keeps blocks for a peer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.kv_cache.revocation import FindLacking
from engine.sequence import Sequence
from pdserve.ipc.messages import LeaseCached, StartRead
from pdserve.records import KVConnectorOrders, ModelRunnerOutput, Peer
from pdserve.request_cost import LinearCost


class PeerKV:
    """The interface, and a node without peers: nothing can be loaded, nothing is leased."""

    # ------------------------------------------------------------ loads

    def loadable(self, sequence: Sequence) -> int:
        """Return how many leading tokens can be loaded, cached ones included; 0: compute the prompt here."""
        return 0

    @property
    def load_cost(self) -> LinearCost:
        """Measured seconds of a load, by tokens."""
        return LinearCost()

    def connect(self, peer: Peer) -> None:
        """Order a connection to a peer."""

    def disconnect(self, epoch: str) -> None:
        """Order the end of a connection."""

    def load(self, sequence: Sequence) -> None:
        """Begin to load the rest of a prompt into the blocks that the sequence holds."""
        raise AssertionError("a load without loadable tokens")

    def load_behind(self, sequence: Sequence, num_tokens: int) -> None:
        """Load only what follows the first ``num_tokens`` tokens, in full blocks. No read has been ordered yet."""

    def start_read(self, message: StartRead) -> None:
        """Order the read of the next blocks of a load. Ignored for a load that has ended."""

    def reading(self, sequence: Sequence) -> bool:
        """Whether a transfer may write to blocks of the sequence."""
        return False

    def handoff_ends(self, rid: int, at: float) -> None:
        """The peer's last chunk of a load ends ``at``. Ignored for a load that has ended."""

    @property
    def arrivals(self) -> Iterable[float]:
        """Expected ends of loads whose peer computes the last chunk: as long after it as earlier loads took.

        Times are of the scheduler's clock.
        """
        return ()

    @property
    def loads(self) -> bool:
        """Whether a prompt is being loaded."""
        return False

    def take_started(self) -> Collection[int]:
        """Return the rids whose reads were ordered since the last call."""
        return ()

    def finish_load(self, sequence: Sequence, num_tokens: int, at: float) -> bool:
        """End a load whose KV, of the first ``num_tokens`` tokens, has been read and confirmed ``at``.

        Return whether the sequence can continue with it: False if its recurrent state has not been read.
        """
        raise AssertionError("the end of a load that never began")

    def abandon_load(self, sequence: Sequence) -> Collection[int]:
        """End a load, if there is one, before the sequence frees its blocks.

        Return the blocks that a transfer may still write to: they stay quarantined until it has ended. So does the slot
        of its recurrent state, which the sequence loses here.
        """
        return ()

    # ------------------------------------------------------------ leases

    def scheduled(self, sequence: Sequence) -> None:
        """The step that is planned computes more of a prompt."""

    def take_last_chunks(self) -> Collection[int]:
        """Return the rids of peers' prompts that end in steps planned since the last call."""
        return ()

    def computed(self, sequence: Sequence) -> None:
        """More of a prompt has been computed: keep the blocks that a peer may read, beyond the end of the sequence."""

    def lease_cached(self, message: LeaseCached) -> None:
        """Lease the cached blocks of a prompt to a peer, and announce them."""

    def free_lease(self, rid: int) -> None:
        """Stop keeping the blocks of a request for its peer. Unknown rids are ignored."""

    def revoke(self, lacking: FindLacking) -> bool:
        """Requests of this node lack blocks: ask for the leases of pulls that are in their way, if these suffice.

        Return ``revoking``.
        """
        return False

    @property
    def revoking(self) -> bool:
        """Whether leases that were asked for have not ended: wait, rather than preempt or refuse a request."""
        return False

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the worker sides."""
        return False

    def add_orders(self, orders: KVConnectorOrders) -> KVConnectorOrders:
        """Return the orders with those of peers since the last call."""
        return orders

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the ends of reads and connections."""
