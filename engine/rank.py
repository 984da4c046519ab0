"""What carries out a step: a model runner and a connector, side by side on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pdserve.kv import KVLayout
from pdserve.protocols import KVConnector, ModelRunner, PendingStep
from pdserve.records import ModelRunnerOutput, StepPlan


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
