"""The seams of the engine: what it needs of a model runner and of a connector. Torch-free on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdserve.kv import KVLayout
from pdserve.records import KVConnectorOutput, KVRead, KVRegion, Peer, RankKV, StepOutput, StepPlan


class PendingStep(Protocol):
    """A step that was launched: the device may still be computing it."""

    def result(self) -> StepOutput:
        """Wait until the step's tokens are on the host, and return them. Called once, in the order of launching.

        Then all KV of the step is in the cache, for peers to read, also where the step sampled nothing: the engine
        announces it, and gives away blocks that the step wrote to.
        """


class ModelRunner(Protocol):
    """Owns the weights, the KV cache and the state of running sequences on one rank.

    V1 and V2 implement it alike. All that can be told from above is ``max_in_flight``: a runner with one step for each
    pipeline stage is never given a plan that goes on with a token of a step in flight (microbatch.py says why);
    one with a step more is, since it takes sampled tokens over by itself.
    """

    @property
    def max_in_flight(self) -> int:
        """How many steps may be launched without their results having been taken: one per stage, or one more."""

    @property
    def kv_layout(self) -> KVLayout:
        """Geometry of the registered KV cache."""

    @property
    def kv_region(self) -> KVRegion:
        """Memory of the registered KV cache."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. A plan without scheduled sequences only updates state.

        Where ``max_in_flight`` allows for it, a sequence may be scheduled for the token that a step in flight samples.
        """

    def reload_weights(self, model_dir: str) -> None:
        """Read another checkpoint of the same architecture and shape; no step may be in flight.

        KV that was computed before stays in the cache; whoever shares prefixes has to forget them. Raises
        CheckpointError; only another reload makes the runner usable then.
        """

    def close(self) -> None:
        """Free device memory. Idempotent; the runner cannot be used afterwards."""


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
