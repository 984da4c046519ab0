"""Protocols between the engine, a model runner and a KV connector. Torch-free on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from pdserve.hashing import BlockHashes
from pdserve.kv import KVLayout
from pdserve.records import (
    DigestOrder,
    KVConnectorOutput,
    KVConnectorPlan,
    KVRead,
    KVRegion,
    ModelRunnerOutput,
    Peer,
    RankKV,
    StepOutput,
    StepPlan,
)
from pdserve.throughput import LinearCost


class PendingStep(Protocol):
    """A launched step; the device may still be computing it."""

    def result(self) -> StepOutput:
        """Wait until the step's tokens are on the host, and return them. Called once per step, in launch order.

        All KV of the step is then in the cache, also if the step sampled nothing: the engine announces it to peers and
        reuses blocks that the step wrote to.
        """


class ModelRunner(Protocol):
    """Owns the weights, the KV cache and the state of running sequences on one rank.

    The engine sees one difference between runners, ``max_in_flight``. A runner with one step per pipeline stage never
    gets a plan that continues from a token of a step in flight (microbatch.py says why). A runner with one step more
    does: it takes over sampled tokens on the device.
    """

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before a result is taken: one per pipeline stage, or one more."""

    @property
    def kv_layout(self) -> KVLayout:
        """Geometry of the registered KV cache."""

    @property
    def kv_region(self) -> KVRegion:
        """Memory of the registered KV cache."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. A plan without scheduled sequences only updates state.

        If ``max_in_flight`` allows it, a sequence may be scheduled for the token that a step in flight samples.
        """

    def reload_weights(self, model_dir: str) -> None:
        """Read another checkpoint of the same architecture and shape; no step may be in flight.

        KV computed before stays in the cache; the caller must drop its prefix cache. Raises CheckpointError: then only
        another reload makes the runner usable.
        """

    def close(self) -> None:
        """Free device memory. Idempotent; the runner cannot be used afterwards."""


class KVConnector(Protocol):
    """Worker side of the KV connector, one per rank: moves blocks and reports. No call waits for a transfer or a peer.

    The local blocks of a read belong to the transfer until ``poll`` has returned its ReadResult. Until then the
    scheduler may give up the request but must not hand out the blocks.
    """

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        """Register the KV cache and return what peers need to read it.

        ``on_progress`` is called from any thread when ``poll`` has something new.
        """

    def connect(self, peer: Peer) -> None:
        """Order a connection; ``poll`` reports the epoch as connected or failed."""

    def disconnect(self, epoch: str) -> None:
        """Forget a peer. Its unfinished reads end with an error, each once no more of its bytes can land."""

    def read(self, read: KVRead) -> None:
        """Order a read from a connected peer; ``poll`` reports its end. An unknown epoch ends it with an error."""

    def poll(self) -> KVConnectorOutput:
        """Return all events since the last poll."""

    def close(self) -> None:
        """Stop. Idempotent."""


class KVSequence(Protocol):
    """The view that the connector's scheduler side has of a sequence. It changes nothing in it."""

    @property
    def rid(self) -> int: ...
    @property
    def token_ids(self) -> array[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def hashes(self) -> BlockHashes:
        """Digests of its blocks, by which a tier can find their KV."""

    @property
    def num_computed(self) -> int:
        """Leading tokens with KV on this node."""

    @property
    def blocks(self) -> Sequence[int]:
        """Blocks that it holds, in token order."""

    @property
    def from_peer(self) -> bool:
        """Whether a peer computes the prompt and this node reads it (on D)."""

    @property
    def for_peer(self) -> bool:
        """Whether this node computes the prompt and a peer reads it (on P)."""

    @property
    def skip_tokens(self) -> int:
        """Leading tokens that the peer has already; a multiple of the block size (on P)."""


class KVConnectorScheduler(Protocol):
    """Scheduler side of the KV connector, one per node: decides on plain values, without a device or I/O.

    The scheduler asks nothing else about KV outside of its own block pool. An implementation is a source or a sink of
    KV: peers today, other tiers (host memory, disk) later.
    """

    # ---- What of a prompt is available elsewhere, and at what cost

    def loadable(self, sequence: KVSequence) -> int:
        """Return how many leading prompt tokens can be loaded, cached ones included; 0: compute the prompt here."""

    @property
    def load_cost(self) -> LinearCost:
        """Measured seconds of a load, by tokens."""

    # ---- Which blocks to load before a step

    def connect(self, peer: Peer) -> None:
        """Order a connection to a peer."""

    def disconnect(self, epoch: str) -> None:
        """Order the end of a connection."""

    def load(self, sequence: KVSequence) -> None:
        """Begin to load the rest of a prompt into the blocks that the sequence holds."""

    def start_read(
        self, rid: int, epoch: str, remote_blocks: tuple[int, ...], num_tokens: int, digests: tuple[int, ...]
    ) -> None:
        """Order the read of the next blocks of a load, up to ``num_tokens`` of the prompt, which a peer has announced.

        Ignored for a load that has ended.
        """

    def take_started(self) -> Collection[int]:
        """Return the rids whose reads were ordered since the last call."""

    def finish_load(self, sequence: KVSequence) -> None:
        """End a load whose KV has been read in full and confirmed."""

    @property
    def has_orders(self) -> bool:
        """Whether the next step has something to do for the connector."""

    def take_orders(self) -> KVConnectorPlan:
        """Return the orders since the last call, for the worker side of every rank."""

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        """Return the digests that the next step has to compute."""

    def update(self, output: ModelRunnerOutput) -> None:
        """Take in the digests and the connector output of a step."""

    # ---- What to keep after a sequence has ended or a block is evicted

    def computed(self, sequence: KVSequence) -> None:
        """More of a prompt has been computed: keep the blocks that a peer may read, beyond the end of the sequence."""

    def free_lease(self, rid: int) -> None:
        """Stop keeping the blocks of a request for its peer. Unknown rids are ignored."""

    def abandon_load(self, sequence: KVSequence) -> Collection[int]:
        """End a load, if there is one, before the sequence frees its blocks.

        Return the blocks that a transfer may still write to: they stay quarantined until it has ended.
        """

    # ---- KV events for routers

    def take_events(self) -> tuple[Collection[bytes], Collection[bytes]]:
        """Return the digests of blocks that became available and that were evicted since the last call."""
