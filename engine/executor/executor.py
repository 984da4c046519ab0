"""All ranks of a node as one: a plan goes to each of them, and its output is there when every rank has answered.

step loop ──plan──► Executor ─┬─ Rank 0, here ─────────────────────────► its output ──┐
    ▲                         └─ Crew ──► other ranks ──► their outputs, on a thread ─┤
    └──────────────────────── output of the step and news of connectors ◄── Aggregator
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.executor.aggregator import Aggregator
from engine.executor.rank import PendingOutput, Rank
from engine.executor.rank_messages import Step
from engine.executor.rank_processes import RankProcesses
from engine.liveness.heartbeat_monitor import HeartbeatMonitor
from pdserve.kv import KVLayout
from pdserve.records import NO_STEP, ModelRunnerOutput, StepPlan


@dataclass(frozen=True, slots=True)
class PendingOutputs:
    """A step that was launched on all ranks."""

    _plan: StepPlan
    _own: PendingOutput
    _executor: Executor

    def result(self) -> ModelRunnerOutput:
        """Wait for every rank: only then all KV of the step is in the caches. Called once."""
        return self._executor.take(self._plan, self._own)


class Executor:
    """Has the face of a Rank. ``wake`` is called, on any thread, when ranks have news and no step brings them."""

    def __init__(self, rank: Rank, crew: RankProcesses, aggregator: Aggregator, wake: Callable[[], None]) -> None:
        """The ranks must be ready."""
        self._rank = rank
        self._crew = crew
        self._aggregator = aggregator
        self._wake = wake
        self._heard = threading.Condition()  # guards the aggregator
        self._waited = 0.0  # seconds, for other ranks
        crew.on_output = self._hear

    @property
    def max_in_flight(self) -> int:
        """How many steps may be launched without their results having been taken."""
        return self._rank.max_in_flight

    @property
    def kv_layout(self) -> KVLayout:
        """That of rank 0; every rank has as many blocks."""
        return self._rank.kv_layout

    @property
    def runner_seconds(self) -> float:
        """Spent in the runner of rank 0, and waiting for other ranks."""
        return self._rank.runner_seconds + self._waited

    @property
    def monitors(self) -> Sequence[HeartbeatMonitor]:
        """Of the other ranks."""
        return self._crew.monitors

    def launch(self, plan: StepPlan) -> PendingOutputs:
        """Start a step on all ranks. An empty plan goes to none of the others: they tell their news by themselves."""
        if plan.has_orders:
            with self._heard:
                self._aggregator.expect(plan)
            self._crew.send(Step(plan))
        with self._crew.blamed_first():
            return PendingOutputs(plan, self._rank.launch(plan), self)

    def take(self, plan: StepPlan, own: PendingOutput) -> ModelRunnerOutput:
        """Wait for a launched step; for its PendingOutputs only."""
        with self._crew.blamed_first():
            output = own.result()
        start = time.perf_counter()
        with self._heard:
            self._aggregator.add(0, output)
            if not plan.has_orders:
                return ModelRunnerOutput(output.step, self._aggregator.take_news())
            while self._aggregator.missing(plan.step):
                self._heard.wait()
            self._waited += time.perf_counter() - start
            return self._aggregator.take(plan.step)

    def waiting_for(self) -> str:
        """Which ranks have not reported what others have, in words; any thread may ask."""
        with self._heard:
            return self._aggregator.waiting_for

    def announce_shutdown(self) -> None:
        """Let the other ranks end in peace: the node was told to stop. Without, they take the end for a failure."""
        self._crew.announce_shutdown()

    def close(self) -> None:
        self._rank.close()
        self._crew.close()

    def _hear(self, rank: int, output: ModelRunnerOutput) -> None:
        """On the crew's thread."""
        with self._heard:
            self._aggregator.add(rank, output)
            self._heard.notify()
            news = self._aggregator.has_news and output.step.step == NO_STEP
        if news:
            self._wake()
