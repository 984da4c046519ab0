"""What carries out a step: a model runner and a connector, side by side on one device."""

from __future__ import annotations

from pdserve.protocols import KVConnector, ModelRunner
from pdserve.records import ModelRunnerOutput, StepOutput, StepPlan


class Rank:
    """One rank. It answers every step with a ModelRunnerOutput, also steps without a forward pass."""

    def __init__(self, runner: ModelRunner, connector: KVConnector) -> None:
        self._runner = runner
        self._connector = connector

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        """Order transfers, run the model, and ask what the connector has to tell."""
        self._load_kv(plan)
        step = self._runner.execute(plan) if plan.scheduled or plan.finished else StepOutput(plan.step)
        return ModelRunnerOutput(step, self._connector.poll())

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
