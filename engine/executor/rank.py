"""One rank of a node: a model runner and a connector on one device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from engine.executor.adapter_loads import AdapterLoads
from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor
from pdserve.kv.disk_transfers import AnyDiskOrder, DiskEvent
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import StateLayout
from pdserve.pausing import Pausing, complete
from pdserve.protocols import DiskKV, HostMemory, KVConnector, ModelRunner, PendingDigests, PendingStep, WeightSource
from pdserve.records import EMPTY_OUTPUT, KVConnectorOrders, KVConnectorOutput, ModelRunnerOutput, StepPlan
from pdserve.weights.change import FileStates, WeightChange
from pdserve.weights.sharing import RankWeights

#: A launched step: called once, in the order of launches, it waits for the step's tokens, then polls connectors.
Pending = Callable[[], ModelRunnerOutput]


class Ranks(Protocol):
    """Executes the steps of a node: its only rank, or an Executor over several (engine/executor/executor.py)."""

    max_in_flight: int  # steps that may be launched before the result of the first is taken
    kv_layout: KVLayout  # rank 0's layout; every rank has as many blocks
    state_layout: StateLayout | None  # rank 0's layout; every rank has as many slots; None: no recurrent layers
    monitors: Sequence[HeartbeatMonitor]  # one for each rank but the leader

    @property
    def digesting(self) -> bool:
        """Whether digests are computed beside steps, so that ``poll`` has something new soon."""

    @property
    def runner_seconds(self) -> float:
        """Time spent launching, and waiting for devices."""

    def waiting_for(self) -> str:
        """Describe the ranks that a step or read waits for. Any thread may call it."""

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[Pending]:
        """Start a step. See ModelRunner for the pauses, in which ``oldest_is_done`` tells whether to take a result."""

    def oldest_is_done(self) -> bool:
        """Whether the result of the oldest step in flight is ready; False if unknown."""

    def delays_results(self, plan: StepPlan) -> bool:
        """Whether the launch of ``plan`` has no pauses, and may take longer than a step in flight."""

    def start_transfers(self, orders: KVConnectorOrders) -> None:
        """Carry out orders for the connector of every rank, whether or not steps are in flight."""

    def poll(self) -> ModelRunnerOutput:
        """Return connector events outside a step; EMPTY_OUTPUT if there are none."""

    def check_weights(self, change: WeightChange) -> None:
        """See ModelRunner; no step may be in flight. All ranks take part."""

    def change_weights(self, change: WeightChange) -> None:
        """See ModelRunner; no step may be in flight. All ranks take part."""

    @property
    def has_weights(self) -> bool:
        """See ModelRunner."""

    def announce_shutdown(self) -> None:
        """Tell the other ranks to exit; otherwise they take the end of this process for a failure."""

    def close(self) -> None:
        """Release devices and connections. Nothing is launched afterwards."""


class NoHostMemory:
    """The HostMemory of a rank without any: nothing is copied."""

    def allocate(self) -> None:
        raise AssertionError("host memory that the node does not have")

    def copy(self, order: HostCopy) -> None:
        raise AssertionError("a copy to host memory that the node does not have")

    def poll(self) -> tuple[tuple[CopyResult, ...], tuple[HostRoom, ...]]:
        return (), ()

    def close(self) -> None:
        pass


class NoDisk:
    """The DiskKV of a rank without any: nothing is moved."""

    def order(self, order: AnyDiskOrder) -> None:
        raise AssertionError("KV on disk that the node does not have")

    def poll(self) -> tuple[DiskEvent, ...]:
        return ()

    def close(self) -> None:
        pass


class Rank:
    """Answers every step with a ModelRunnerOutput, also steps without a forward pass."""

    def __init__(
        self,
        runner: ModelRunner,
        connector: KVConnector,
        weights: WeightSource | None = None,
        host_memory: HostMemory | None = None,
        disk: DiskKV | None = None,
        on_events: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_events`` is called, on any thread, when ``poll`` has the end of an adapter's load."""
        self.max_in_flight = runner.max_in_flight
        self.kv_layout = runner.kv_layout
        self.state_layout = runner.state_layout
        self.monitors: Sequence[HeartbeatMonitor] = ()
        self.runner_seconds = 0.0
        self._runner = runner
        self._connector = connector
        self._host_memory = NoHostMemory() if host_memory is None else host_memory
        self._disk = NoDisk() if disk is None else disk
        self._adapters = AdapterLoads(runner, on_events)
        self._in_flight: deque[PendingStep] = deque()
        self._weights = weights
        self._digests: deque[tuple[int, PendingDigests]] = deque()  # with the ids of their orders

    @property
    def offered_weights(self) -> RankWeights | None:
        """The tensors that peers may read from this rank; None if it offers none."""
        return None if self._weights is None else self._weights.offer

    @property
    def loaded_files(self) -> FileStates:
        """See ModelRunner."""
        return self._runner.loaded_files

    def waiting_for(self) -> str:
        return ""

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step without pauses."""
        return complete(self.launch_with_pauses(plan))

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[Pending]:
        step = yield from self._timed(self._runner.launch_with_pauses(plan))
        self._in_flight.append(step)
        return self._take

    def _timed(self, launch: Pausing[PendingStep]) -> Pausing[PendingStep]:
        """Add the time of a launch, without its pauses, to ``runner_seconds``."""
        while True:
            start = time.perf_counter()
            try:
                next(launch)
            except StopIteration as end:
                step: PendingStep = end.value
                return step
            finally:
                self.runner_seconds += time.perf_counter() - start
            yield

    def oldest_is_done(self) -> bool:
        return bool(self._in_flight) and self._in_flight[0].done()

    def delays_results(self, plan: StepPlan) -> bool:
        return False

    def launches_by_layer(self, plan: StepPlan) -> bool:
        """See ModelRunner."""
        return self._runner.launches_by_layer(plan)

    def _take(self) -> ModelRunnerOutput:
        start = time.perf_counter()
        output = self._in_flight.popleft().result()
        self.runner_seconds += time.perf_counter() - start
        return ModelRunnerOutput(output, self._poll_connector())

    def check_weights(self, change: WeightChange) -> None:
        self._runner.check_weights(change)

    def change_weights(self, change: WeightChange) -> None:
        self._runner.change_weights(change)

    @property
    def has_weights(self) -> bool:
        return self._runner.has_weights

    def start_transfers(self, orders: KVConnectorOrders) -> None:
        for epoch in orders.disconnect:
            self._connector.disconnect(epoch)
        for peer in orders.connect:
            self._connector.connect(peer)
        for read in orders.reads:
            self._connector.read(read)
        if orders.allocate_host_memory:
            self._host_memory.allocate()
        for copy in orders.copies:
            self._host_memory.copy(copy)
        for disk_order in orders.disk:
            self._disk.order(disk_order)
        for digest in orders.dropped_adapters:
            self._runner.drop_adapter(digest)
        for adapter in orders.adapters:
            self._adapters.begin(adapter)
        for number, order in orders.digests:
            self._digests.append((number, self._runner.digest(order)))

    def poll(self) -> ModelRunnerOutput:
        events = self._poll_connector()
        return ModelRunnerOutput(EMPTY_OUTPUT.step, events) if events else EMPTY_OUTPUT

    @property
    def digesting(self) -> bool:
        return bool(self._digests)

    def _poll_connector(self) -> KVConnectorOutput:
        """Return the connector's events, what host memory and disk report, loaded adapters and digests beside steps."""
        events = self._connector.poll()
        copied, room = self._host_memory.poll()
        if copied or room:
            events = msgspec.structs.replace(events, copied=copied, host_room=room)
        if disk := self._disk.poll():
            events = msgspec.structs.replace(events, disk=disk)
        if adapters := self._adapters.take_ended():
            events = msgspec.structs.replace(events, adapters=adapters)
        digested: list[tuple[int, tuple[int, ...]]] = []
        while self._digests and self._digests[0][1].done():
            number, digests = self._digests.popleft()
            digested.append((number, digests.result()))
        return msgspec.structs.replace(events, digested=tuple(digested)) if digested else events

    def announce_shutdown(self) -> None:
        """Do nothing: there are no other ranks."""

    def close(self) -> None:
        self._adapters.close()
        if self._weights is not None:
            self._weights.close()
        self._disk.close()
        self._host_memory.close()
        self._connector.close()
        self._runner.close()
