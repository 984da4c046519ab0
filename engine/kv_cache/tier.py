"""Base of tiers behind the prefix cache: a scheduler side that passes on to the next one what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.kv_cache.cache_recorder import CacheRecorder
from engine.kv_cache.connector_scheduler import FindPace, KVConnectorScheduler
from engine.kv_cache.revocation import FindLacking
from engine.request import Sequence
from engine.step_cost_meter import StepCostMeter
from pdserve.ipc.cache_changes import CacheChanges
from pdserve.ipc.messages import LeaseCached, StartRead, Totals
from pdserve.records import DigestOrder, KVConnectorOrders, ModelRunnerOutput, Peer
from pdserve.request_cost import LinearCost


class Tier(KVConnectorScheduler):
    """All loads and leases are those of ``behind``, the scheduler side of the peer connector or of another tier."""

    def __init__(self, behind: KVConnectorScheduler) -> None:
        super().__init__(behind._pool, behind._events, behind._block_size, behind._states)
        self._behind = behind
        self._digests = behind._digests  # numbers of orders are unique in an engine

    def attach(self, meter: StepCostMeter, totals: Totals, clock: Callable[[], float], pace: FindPace) -> None:
        self._behind.attach(meter, totals, clock, pace)

    def loadable(self, sequence: Sequence) -> int:
        return self._behind.loadable(sequence)

    @property
    def load_cost(self) -> LinearCost:
        return self._behind.load_cost

    def connect(self, peer: Peer) -> None:
        self._behind.connect(peer)

    def disconnect(self, epoch: str) -> None:
        self._behind.disconnect(epoch)

    def load(self, sequence: Sequence) -> None:
        self._behind.load(sequence)

    def load_behind(self, sequence: Sequence, num_tokens: int) -> None:
        self._behind.load_behind(sequence, num_tokens)

    def start_read(self, message: StartRead) -> None:
        self._behind.start_read(message)

    def reading(self, sequence: Sequence) -> bool:
        return self._behind.reading(sequence)

    def handoff_ends(self, rid: int, at: float) -> None:
        self._behind.handoff_ends(rid, at)

    @property
    def arrivals(self) -> Iterable[float]:
        return self._behind.arrivals

    @property
    def loads(self) -> bool:
        return self._behind.loads

    def take_started(self) -> Collection[int]:
        return self._behind.take_started()

    def finish_load(self, sequence: Sequence, num_tokens: int, at: float) -> bool:
        return self._behind.finish_load(sequence, num_tokens, at)

    def abandon_load(self, sequence: Sequence) -> Collection[int]:
        return self._behind.abandon_load(sequence)

    def use_weights(self, version: str) -> None:
        self._behind.use_weights(version)

    # ------------------------------------------------------------ fetches

    @property
    def fetches(self) -> bool:
        return self._behind.fetches

    def considered(self, sequence: Sequence) -> bool:
        return self._behind.considered(sequence)

    def fetch(self, sequence: Sequence) -> bool:
        return self._behind.fetch(sequence)

    def fetching(self, sequence: Sequence) -> bool:
        return self._behind.fetching(sequence)

    def end_fetch(self, sequence: Sequence) -> None:
        self._behind.end_fetch(sequence)

    def give_way(self) -> bool:
        return self._behind.give_way()

    @property
    def copying(self) -> bool:
        return self._behind.copying

    def forget_stored(self) -> None:
        self._behind.forget_stored()

    @property
    def host_blocks(self) -> tuple[int, int]:
        return self._behind.host_blocks

    @property
    def disk_blocks(self) -> int:
        return self._behind.disk_blocks

    # ------------------------------------------------------------ orders and results

    @property
    def has_orders(self) -> bool:
        return self._behind.has_orders

    def take_orders(self) -> KVConnectorOrders:
        return self._behind.take_orders()

    def take_digest_orders(self) -> tuple[DigestOrder, ...]:
        return self._behind.take_digest_orders()

    def update(self, output: ModelRunnerOutput) -> None:
        self._behind.update(output)

    def scheduled(self, sequence: Sequence) -> None:
        self._behind.scheduled(sequence)

    def take_last_chunks(self) -> Collection[int]:
        return self._behind.take_last_chunks()

    def computed(self, sequence: Sequence) -> None:
        self._behind.computed(sequence)

    def lease_cached(self, message: LeaseCached) -> None:
        self._behind.lease_cached(message)

    def free_lease(self, rid: int) -> None:
        self._behind.free_lease(rid)

    def revoke(self, lacking: FindLacking) -> bool:
        return self._behind.revoke(lacking)

    @property
    def revoking(self) -> bool:
        return self._behind.revoking

    def record_cache(self, recorder: CacheRecorder) -> None:
        self._behind.record_cache(recorder)

    def take_events(self) -> tuple[list[bytes], list[bytes], list[CacheChanges]]:
        return self._behind.take_events()
