"""What carries out a step: a model runner and a connector, side by side on one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.liveness.heartbeat_monitor import HeartbeatMonitor
from pdserve.kv import KVLayout
from pdserve.protocols import KVConnector, ModelRunner, PendingStep
from pdserve.records import EMPTY_OUTPUT, ModelRunnerOutput, StepPlan


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's tokens, and ask connectors what they have to tell by then. Called once."""


class Ranks(Protocol):
    """What carries out the steps of a node: its only rank, or all of them together (engine/executor/executor.py)."""

    @property
    def max_in_flight(self) -> int:
        """How many steps may be launched without their results having been taken."""

    @property
    def kv_layout(self) -> KVLayout:
        """That of rank 0; every rank has as many blocks."""

    @property
    def runner_seconds(self) -> float:
        """Spent in the runner: launching, and waiting for devices."""

    @property
    def monitors(self) -> Sequence[HeartbeatMonitor]:
        """Of the other ranks."""

    def waiting_for(self) -> str:
        """Which of the other ranks something waits for, in words; any thread may ask."""

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step."""

    def announce_shutdown(self) -> None:
        """Let the other ranks end in peace: the node was told to stop. Without, they take the end for a failure."""

    def close(self) -> None:
        """End. Nothing is launched afterwards."""


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """A step that was launched on a rank."""

    _step: PendingStep
    _rank: Rank

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's tokens, and ask what the connector has to tell by then. Called once."""
        return self._rank.take(self._step)


class Rank:
    """One rank. It answers every step with a ModelRunnerOutput, also steps without a forward pass."""

    def __init__(self, runner: ModelRunner, connector: KVConnector) -> None:
        self.runner_seconds = 0.0  # spent in the runner: launching, and waiting for the device
        self._runner = runner
        self._connector = connector

    @property
    def max_in_flight(self) -> int:
        """How many steps may be launched without their results having been taken."""
        return self._runner.max_in_flight

    @property
    def kv_layout(self) -> KVLayout:
        return self._runner.kv_layout

    @property
    def monitors(self) -> Sequence[HeartbeatMonitor]:
        return ()

    def waiting_for(self) -> str:
        return ""

    def launch(self, plan: StepPlan) -> PendingOutput:
        """Order transfers and start the model."""
        self._load_kv(plan)
        start = time.perf_counter()
        step = self._runner.launch(plan)
        self.runner_seconds += time.perf_counter() - start
        return PendingOutput(step, self)

    def take(self, step: PendingStep) -> ModelRunnerOutput:
        """Wait for a launched step; for its PendingOutput only."""
        start = time.perf_counter()
        output = step.result()
        self.runner_seconds += time.perf_counter() - start
        return ModelRunnerOutput(output, self._connector.poll())

    def news(self) -> ModelRunnerOutput:
        """What the connector has to tell, of no step."""
        news = self._connector.poll()
        return ModelRunnerOutput(EMPTY_OUTPUT.step, news) if news else EMPTY_OUTPUT

    def announce_shutdown(self) -> None:
        """There are no others."""

    def close(self) -> None:
        self._connector.close()
        self._runner.close()

    def _load_kv(self, plan: StepPlan) -> None:
        orders = plan.connector
        for epoch in orders.disconnect:
            self._connector.disconnect(epoch)
        for peer in orders.connect:
            self._connector.connect(peer)
        for read in orders.reads:
            self._connector.read(read)
