"""Steps between launch and result: step n+1 is launched before the tokens of step n are on the host.

    plan n+1 ──launch──► [ n+1, n ] ──result of n──► apply n, emit, plan n+2 while the device computes n+1

How many steps may be in flight is the runner's to say; with one, a step is taken in where it was launched. Where the
model is split into pipeline stages they are as many as there are stages, each at another stage, or one more.
"""

from __future__ import annotations

import time
from collections import deque

from engine.executor.rank import Pending, Ranks
from pdserve.records import ModelRunnerOutput, StepPlan


class StepPipeline:
    """The steps in flight, oldest first."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_flight: deque[tuple[StepPlan, Pending, float]] = deque()  # with when it was launched
        self._landed_at = 0.0  # when the latest result was there
        self.waited = 0.0  # seconds, for results
        self.lasted = 0.0  # seconds that the latest step took to land which was taken, without those before it

    @property
    def empty(self) -> bool:
        return not self._in_flight

    def launch(self, plan: StepPlan) -> None:
        """Start a step. An empty one only asks the connector for news, and only where nothing else is in flight."""
        if not self._in_flight or plan.has_orders:
            launched_at = time.perf_counter()
            self._in_flight.append((plan, self._ranks.launch(plan), launched_at))

    def take(self, plan: StepPlan) -> tuple[StepPlan, ModelRunnerOutput] | None:
        """The oldest step with its output, waiting for it, if that is due now that ``plan`` has been launched.

        It is due when no more steps may be in flight, and also when ``plan`` computes nothing: then what could be
        planned next depends on results.
        """
        if plan.scheduled and len(self._in_flight) < self._ranks.max_in_flight:
            return None
        oldest, pending, launched_at = self._in_flight.popleft()
        start = time.perf_counter()
        output = pending.result()
        now = time.perf_counter()
        self.waited += now - start
        self.lasted, self._landed_at = now - max(launched_at, self._landed_at), now
        return oldest, output
