"""What carries out a step: a model runner and a connector, side by side on one device."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv import KVLayout
from pdserve.protocols import KVConnector, ModelRunner, PendingStep
from pdserve.records import ModelRunnerOutput, StepPlan


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """A step that was launched on a rank."""

    _step: PendingStep
    _connector: KVConnector

    def result(self) -> ModelRunnerOutput:
        """Wait for the step's tokens, and ask what the connector has to tell by then. Called once."""
        return ModelRunnerOutput(self._step.result(), self._connector.poll())


class Rank:
    """One rank. It answers every step with a ModelRunnerOutput, also steps without a forward pass."""

    def __init__(self, runner: ModelRunner, connector: KVConnector) -> None:
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
        return PendingOutput(self._runner.launch(plan), self._connector)

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
