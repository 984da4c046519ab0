"""Steps between launch and result: step n+1 is launched before the tokens of step n are on the host.

    plan n+1 ──launch──► [ n+1, n ] ──result of n──► apply n, emit, plan n+2 while the device computes n+1
          └ layer by layer: the result of n is taken between the layers as soon as it is there

The runner decides how many steps may be in flight. With one, a step is taken where it was launched. With pipeline
stages there are as many as stages, each at another stage, or one more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.executor.rank import Pending, Ranks
from pdserve.records import ModelRunnerOutput, StepPlan

#: The plan of a step and its output.
Result = tuple[StepPlan, ModelRunnerOutput]


class _Step(NamedTuple):
    plan: StepPlan
    pending: Pending
    launched_at: float
    expected: float  # seconds


class StepPipeline:
    """The steps in flight, oldest first."""

    def __init__(self, ranks: Ranks, expected: Callable[[StepPlan], float] = lambda plan: 0.0) -> None:
        """``expected`` tells the seconds that a step takes."""
        self._ranks = ranks
        self._expected = expected
        self._in_flight: deque[_Step] = deque()
        self.expected = 0.0  # seconds that the steps in flight take when the latest one is launched
        self._last_result_at = 0.0
        self.waited = 0.0  # seconds spent waiting for results
        self.step_seconds = 0.0  # duration of the last step taken, without the time of the steps before it

    @property
    def empty(self) -> bool:
        return not self._in_flight

    def launch(self, plan: StepPlan) -> Iterator[Result]:
        """Start a step, and yield the results of earlier steps that would else wait for its launch. Iterate to the end.

        An empty step is dropped.
        """
        if not plan.has_orders:
            return
        if self._delays_result(plan):
            yield self.take_oldest()
        launched_at, expected = time.perf_counter(), self._expected(plan)
        self.expected = expected + sum(step.expected for step in self._in_flight)
        launch = self._ranks.launch_with_pauses(plan)
        while True:
            try:
                next(launch)
            except StopIteration as end:
                self._in_flight.append(_Step(plan, end.value, launched_at, expected))
                return
            if self._in_flight and self._ranks.oldest_is_done():
                yield self.take_oldest()

    def _delays_result(self, plan: StepPlan) -> bool:
        """Whether the result of a short step in flight would wait for the long launch of ``plan``."""
        if len(self._in_flight) != 1 or self._ranks.max_in_flight != 2:
            return False
        return self._ranks.delays_results(plan) and not self._ranks.delays_results(self._in_flight[0].plan)

    def take(self, plan: StepPlan) -> Result | None:
        """Wait for the oldest step and return it with its output, if it is due after the launch of ``plan``.

        It is due when no more steps may be in flight. It is also due when ``plan`` computes nothing: then the next plan
        depends on results.
        """
        if not self._in_flight:
            return None
        if plan.scheduled and len(self._in_flight) < self._ranks.max_in_flight:
            return None
        return self.take_oldest()

    def take_oldest(self) -> Result:
        """Wait for the oldest step."""
        oldest = self._in_flight.popleft()
        start = time.perf_counter()
        output = oldest.pending()
        now = time.perf_counter()
        self.waited += now - start
        self.step_seconds, self._last_result_at = now - max(oldest.launched_at, self._last_result_at), now
        return oldest.plan, output
