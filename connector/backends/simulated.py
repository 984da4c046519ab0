"""The connector of simulated nodes: reads end after the time that their cost model says, and move nothing."""

from __future__ import annotations

import time

from connector.serial_connector import SerialConnector
from connector.setup import ConnectorSetup
from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.kv.states import NO_SLOT
from pdserve.kv.transports import UNKNOWN, Connected
from pdserve.records import KVRead, Peer, ReadResult


class SimulatedConnector(SerialConnector):
    """Reads one after the other, from all peers; a peer's sending rate is not limited.

    It cannot see a dead peer and connects to all. The frontend notices the broken stream to the peer, disconnects, and
    uses no KV without a lease that stood.
    """

    def __init__(self, setup: ConnectorSetup) -> None:
        super().__init__(setup.agent, b"simulated", states=setup.states)
        self._costs = setup.costs or SimulatedCosts()
        self._busy_until = 0.0

    def _connect_to(self, peer: Peer) -> Connected:
        return Connected(peer.epoch, UNKNOWN, "simulated")

    def _due_at(self, read: KVRead) -> float:
        self._busy_until = max(self._busy_until, time.monotonic()) + self._seconds(read)
        return self._busy_until

    def _execute(self, read: KVRead) -> ReadResult:
        num_blocks = len(read.local_blocks)
        num_bytes = num_blocks * self._rank.layout.block_bytes + self._state_bytes(read)
        return ReadResult(read.read_id, "", num_bytes, num_blocks, self._seconds(read))

    def _seconds(self, read: KVRead) -> float:
        """A state takes as long as the KV of as many bytes."""
        layout = self._rank.layout
        part = layout.num_layers / (len(layout.groups.layers) or layout.num_layers)  # share of all layers in a block
        num_tokens = len(read.local_blocks) * part * layout.block_size
        return self._costs.of_read(round(num_tokens + self._state_bytes(read) / layout.bytes_per_token))

    def _state_bytes(self, read: KVRead) -> int:
        states = self._rank.states
        return 0 if states is None or read.remote_state == NO_SLOT else states.layout.slot_bytes
