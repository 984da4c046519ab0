"""Protocols between the engine, a model runner and a KV connector. Torch-free on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.adapters.adapter import Adapter
from pdserve.kv.disk_transfers import AnyDiskOrder, DiskEvent
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.kv.states import StateLayout
from pdserve.pausing import Pausing
from pdserve.records import DigestOrder, KVConnectorOutput, KVRead, Peer, RankKV, StepOutput, StepPlan
from pdserve.weights.change import FileStates, WeightChange
from pdserve.weights.sharing import OfferedMemory, PartRead, RankWeights, WeightPeer


class PendingStep(Protocol):
    """A launched step; the device may still be computing it."""

    def result(self) -> StepOutput:
        """Wait until the step's tokens are on the host, and return them. Called once per step, in launch order.

        All KV of the step is then in the cache, also if it sampled nothing: peers may read it, its blocks be reused.
        """

    def done(self) -> bool:
        """Whether ``result`` would not wait."""


class PendingDigests(Protocol):
    """Digests that the device computes beside steps."""

    def done(self) -> bool:
        """Whether ``result`` would not wait."""

    def result(self) -> tuple[int, ...]:
        """Wait for the digests; return a signed 64-bit number per block."""


class ModelRunner(Protocol):
    """Owns the weights, the KV cache and the state of running sequences on one rank."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before a result is taken: one per pipeline stage, or one more.

        With one per stage, no plan continues from a token of a step in flight (engine/scheduler/microbatch.py). With
        one more, the runner takes over sampled tokens on the device.
        """

    @property
    def kv_layout(self) -> KVLayout:
        """Geometry of the registered KV cache."""

    @property
    def kv_region(self) -> KVRegion:
        """Memory of the registered KV cache."""

    @property
    def state_layout(self) -> StateLayout | None:
        """Geometry of the registered recurrent states; None if the model has none."""

    @property
    def state_region(self) -> KVRegion | None:
        """Memory of the registered recurrent states; None if the model has none."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start one step. A plan without scheduled sequences only updates state."""

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[PendingStep]:
        """Start one step as ``launch`` does, with pauses between layers if it launches them one by one.

        In a pause the result of an earlier step may be taken. The launch must end before the next one begins.
        """

    def digest(self, order: DigestOrder) -> PendingDigests:
        """Start to compute the digests of blocks that no step writes to. It waits for no step, nor do steps for it.

        Any thread may call it.
        """

    def launches_by_layer(self, plan: StepPlan) -> bool:
        """Whether the layers of this step are launched one by one: tens of milliseconds of the host's time.

        False if a CUDA graph holds the step, or if launches take no time that matters.
        """

    @property
    def loaded_files(self) -> FileStates:
        """The files of this host that the weights were read from at the start; empty for random weights."""

    def offered_weights(self) -> OfferedMemory:
        """Return the tensors that are in memory as the checkpoint stores them, for peers that start.

        The next change of weights ends the offer; call this again after it.
        """

    def check_weights(self, change: WeightChange) -> None:
        """Compare a change with the weights in memory, without changing any; no step may be in flight.

        All ranks of a node call it. Raises CheckpointError with the first difference, on every rank.
        """

    def change_weights(self, change: WeightChange) -> None:
        """Overwrite the weights in place; no step may be in flight.

        All ranks of a node call it, and wait for each other. It checks the change first. KV computed before stays in
        the cache; the caller must drop its prefix cache. Peers must not read ``offered_weights`` meanwhile.

        Raises CheckpointError on every rank if one rank fails. Then the old weights are in use (``has_weights``), or
        ``launch`` raises NodeError until a reload succeeds.
        """

    def load_adapter(self, adapter: Adapter) -> None:
        """Read this rank's part of an adapter into host memory. Any thread may call it, beside steps.

        Plans may then name its digest in ``StepPlan.adapters``. Raises CheckpointError.
        """

    def drop_adapter(self, digest: str) -> None:
        """Free the host memory of an adapter, which no slot holds; an unknown one is ignored."""

    @property
    def has_weights(self) -> bool:
        """Whether steps can be launched: False after a reload that failed half-way."""

    def close(self) -> None:
        """Free device memory. Idempotent; the runner cannot be used afterwards."""


class KVConnector(Protocol):
    """Worker side of the KV connector, one per rank: moves blocks and reports. No call waits for a transfer or a peer.

    The local blocks of a read belong to the transfer until ``poll`` has returned its ReadResult. Until then the
    scheduler may give up the request but must not hand out the blocks.
    """

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        """Register the KV cache and return the record with which peers read it.

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


class HostMemory(Protocol):
    """Host memory for blocks of one rank's KV cache and slots of its recurrent states. No call waits for a copy.

    The memory of a copy, on both sides, belongs to the copy until ``poll`` has returned its CopyResult.
    """

    def allocate(self) -> None:
        """Begin to allocate the memory; ``poll`` reports how much there is."""

    def copy(self, order: HostCopy) -> None:
        """Order a copy. Loads do not wait for copies to the host; beside that, copies keep their order."""

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        """Return the copies that have ended since the last poll, and the memory if more of it is allocated."""

    def close(self) -> None:
        """Stop after the copies that have begun. Idempotent."""


class DiskKV(Protocol):
    """Files of blocks of one rank, beside its host memory. No call waits for a file.

    The host memory of a transfer belongs to the transfer until ``poll`` has returned its DiskResult.
    """

    def order(self, order: AnyDiskOrder) -> None:
        """Carry out an order. Reads do not wait for writes; beside that, orders keep their order."""

    def poll(self) -> tuple[DiskEvent, ...]:
        """Return the events since the last poll."""

    def close(self) -> None:
        """Stop, without waiting for a disk that hangs. Idempotent."""


class WeightSource(Protocol):
    """The registered tensors of a rank."""

    @property
    def offer(self) -> RankWeights:
        """Addresses and names of the tensors, for a reader."""

    def close(self) -> None:
        """Deregister them. Idempotent."""


class WeightReader(Protocol):
    """Reads a peer's tensors while a node starts. Used on one thread at a time."""

    @property
    def peer(self) -> WeightPeer:
        """The node that offers the tensors."""

    def open(self, staging: KVRegion) -> None:
        """Register the memory that reads go to. Raises ConfigError or CapacityError."""

    def read(self, reads: Sequence[PartRead]) -> None:
        """Read parts into the staging memory and wait for them. Raises PeerError; then nothing more can be read."""

    @property
    def drained(self) -> bool:
        """Whether no byte can reach the staging memory any more."""

    def close(self) -> None:
        """Close the connections. Idempotent."""
