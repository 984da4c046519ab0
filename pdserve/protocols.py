"""The seams of the engine: what it needs of a model runner and of a connector. Torch-free on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdserve.kv import KVLayout
from pdserve.records import KVConnectorOutput, KVRead, KVRegion, Peer, RankKV, StepOutput, StepPlan


class ModelRunner(Protocol):
    """Owns the weights, the KV cache and the state of running sequences on one rank.

    V1 and V2 implement it alike; nobody above can tell them apart.
    """

    @property
    def kv_layout(self) -> KVLayout:
        """Geometry of the registered KV cache."""

    @property
    def kv_region(self) -> KVRegion:
        """Memory of the registered KV cache."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step and return its samples. A plan without scheduled sequences only updates state."""

    def close(self) -> None:
        """Free device memory. Idempotent."""


class KVConnector(Protocol):
    """Worker side of the connector on one rank: it moves blocks and reports. No call waits for a transfer or a peer.

    Ownership: from ``read`` until the read's ReadResult has been polled, the local blocks belong to the transfer;
    the scheduler may give up on the request, but not hand the blocks to anybody else.
    """

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        """Register the KV cache and return what peers need to read it.

        ``on_progress`` is called from any thread when ``poll`` has something new.
        """

    def connect(self, peer: Peer) -> None:
        """Order a connection; ``poll`` reports the epoch as connected or failed."""

    def disconnect(self, epoch: str) -> None:
        """Forget a peer. Its unfinished reads end with an error, each once no byte of it can land any more."""

    def read(self, read: KVRead) -> None:
        """Order a read from a connected peer; ``poll`` reports its end. An unknown epoch ends it with an error."""

    def poll(self) -> KVConnectorOutput:
        """What happened since the last poll."""

    def close(self) -> None:
        """Stop. Idempotent."""
