"""Executes each step on all ranks of a node; its output is complete once every rank has answered.

step loop ──plan──► Executor ─┬─ Rank 0, in this process ───────────────────────► its output ──┐
    ▲                         └─ RankProcesses ──► other ranks ──► outputs, on its thread ─────┤
    └──────────────────────── output of the step and connector events ◄── OutputAggregator ◄───┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from engine.executor.aggregator import OutputAggregator
from engine.executor.rank import Pending, Rank
from engine.executor.rank_messages import ChangeRank, Step, Transfers
from engine.executor.rank_processes import RankProcesses
from pdserve.errors import CheckpointError
from pdserve.ipc.heartbeat_monitor import HeartbeatMonitor
from pdserve.pausing import Pausing, completed
from pdserve.records import EMPTY_OUTPUT, NO_STEP, KVConnectorOrders, ModelRunnerOutput, StepPlan
from pdserve.weights.change import WeightChange


class Executor:
    """Implements the Ranks protocol over rank 0 and its rank processes, all of them ready."""

    def __init__(
        self, rank: Rank, others: RankProcesses, aggregator: OutputAggregator, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called, on any thread, when ranks have connector events and no step brings them."""
        self.max_in_flight = rank.max_in_flight
        self.kv_layout = rank.kv_layout
        self.state_layout = rank.state_layout
        self.monitors: Sequence[HeartbeatMonitor] = others.monitors
        self._rank = rank
        self._others = others
        self._aggregator = aggregator
        self._wake = wake
        self._reported = threading.Condition()  # guards the aggregator
        self._waited = 0.0  # seconds, for other ranks
        others.on_output = self._on_output

    @property
    def digesting(self) -> bool:
        return self._rank.digesting  # other ranks report theirs themselves

    @property
    def runner_seconds(self) -> float:
        return self._rank.runner_seconds + self._waited

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[Pending]:
        """Start a step on all ranks, without pauses."""
        with self._reported:
            self._aggregator.expect_step(plan.step, plan.digests)
        self._others.send(Step(plan), later=_without_pixels(plan))
        with self._others.reporting_own_failure():
            return completed(partial(self._take, plan, self._rank.launch(plan)))

    def oldest_is_done(self) -> bool:
        """Whether it is done on rank 0; the other ranks end it at about the same time."""
        return self._rank.oldest_is_done()

    def delays_results(self, plan: StepPlan) -> bool:
        return self._rank.launches_by_layer(plan)

    def check_weights(self, change: WeightChange) -> None:
        self._others.send(ChangeRank(change, only_check=True))
        self._on_own_rank(self._rank.check_weights, change)

    def change_weights(self, change: WeightChange) -> None:
        self._others.send(ChangeRank(change, only_check=False))
        self._on_own_rank(self._rank.change_weights, change)

    @property
    def has_weights(self) -> bool:
        return self._rank.has_weights

    def _on_own_rank(self, call: Callable[[WeightChange], None], change: WeightChange) -> None:
        """Raises the CheckpointError on which all ranks agree; any other error ends the node."""
        refusal: CheckpointError | None = None
        with self._others.reporting_own_failure():
            try:
                call(change)
            except CheckpointError as exc:
                refusal = exc
        if refusal is not None:
            raise refusal

    def _take(self, plan: StepPlan, own: Pending) -> ModelRunnerOutput:
        """Wait for every rank: only then all KV of the step is in the caches."""
        with self._others.reporting_own_failure():
            output = own()
        start = time.perf_counter()
        with self._reported:
            self._aggregator.add(0, output)
            while self._aggregator.missing(plan.step):
                self._reported.wait()
            self._waited += time.perf_counter() - start
            return self._aggregator.take(plan.step)

    def start_transfers(self, orders: KVConnectorOrders) -> None:
        with self._reported:
            self._aggregator.expect_transfers(orders)
        self._others.send(Transfers(orders))
        with self._others.reporting_own_failure():
            self._rank.start_transfers(orders)

    def poll(self) -> ModelRunnerOutput:
        with self._others.reporting_own_failure():
            own = self._rank.poll()
        with self._reported:
            self._aggregator.add(0, own)
            events = self._aggregator.take_events()
        return ModelRunnerOutput(EMPTY_OUTPUT.step, events) if events else EMPTY_OUTPUT

    def waiting_for(self) -> str:
        with self._reported:
            return self._aggregator.waiting_for

    def announce_shutdown(self) -> None:
        self._others.announce_shutdown()

    def close(self) -> None:
        self._others.ignore_failures()  # closing rank 0 breaks collectives of the others
        self._rank.close()
        self._others.close()

    def _on_output(self, rank: int, output: ModelRunnerOutput) -> None:
        """Take in another rank's output, on the thread of RankProcesses."""
        with self._reported:
            self._aggregator.add(rank, output)
            self._reported.notify()
            wake = self._aggregator.has_events and output.step.step == NO_STEP
        if wake:
            self._wake()


def _without_pixels(plan: StepPlan) -> Step | None:
    """Return a plan for later stages, which encode no images; None if it has none."""
    if not plan.images:
        return None
    images = tuple(msgspec.structs.replace(image, pixels=b"") for image in plan.images)
    return Step(msgspec.structs.replace(plan, images=images))
