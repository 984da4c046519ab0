"""Steps between launch and result: step n+1 is launched before the tokens of step n are on the host.

    plan n+1 ──launch──► [ n+1, n ] ──result of n──► apply n, emit, plan n+2 while the device computes n+1
          └ layer by layer: the result of n is taken between the layers as soon as it is there

A step with prompts is long, so the one behind it is planned shortly before it ends (``plan_at``): what arrives
meanwhile is in the next step, and not in the one after it.

The runner decides how many steps may be in flight. With one, a step is taken where it was launched. With pipeline
stages there are as many as stages, each at another stage, or one more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from engine.executor.rank import Pending, Ranks
from pdserve.records import ModelRunnerOutput, StepPlan

#: The plan of a step and its output.
Result = tuple[StepPlan, ModelRunnerOutput]


_LEAST_LEAD = 1e-3  # seconds: timers are not more exact
_MOST_LEAD = 10e-3  # seconds; the first use of a kernel takes longer, once
_LEAD_DECAY = 0.9  # per step


class _Step(NamedTuple):
    plan: StepPlan
    pending: Pending
    launched_at: float  # time.perf_counter
    expected: float  # seconds; inf if unknown


class StepPipeline:
    """The steps in flight, oldest first."""

    def __init__(self, ranks: Ranks, stages: int = 1) -> None:
        self._ranks = ranks
        self._stages = stages
        self._lead = _LEAST_LEAD  # seconds from the beginning of a plan until the device has work of its step
        self._in_flight: deque[_Step] = deque()
        self.expected = 0.0  # seconds that the steps in flight take when the latest one is launched
        self._last_result_at = 0.0
        self.waited = 0.0  # seconds spent waiting for results
        self.step_seconds = 0.0  # duration of the last step taken, without the time of the steps before it

    @property
    def empty(self) -> bool:
        return not self._in_flight

    @property
    def busy(self) -> float:
        """Seconds until the steps in flight have ended, as expected; 0.0 if unknown."""
        seconds = sum(step.expected for step in self._in_flight)
        return max(0.0, self._began + seconds - time.perf_counter()) if 0.0 < seconds < inf else 0.0

    @property
    def plan_at(self) -> float:
        """When to plan the next step, as a time of ``time.perf_counter``; 0.0: at once.

        Pipeline stages are free as soon as their step has moved on to the next one.
        """
        if len(self._in_flight) != 1 or self._stages > 1:
            return 0.0
        plan = self._in_flight[0].plan
        if not (plan.num_prompt_tokens or plan.images):
            return 0.0
        return self.ends_at - self._lead

    @property
    def ends_at(self) -> float:
        """When the oldest step ends, as expected; 0.0 if unknown or none is in flight."""
        expected = self._in_flight[0].expected if self._in_flight else inf
        return self._began + expected if expected < inf else 0.0

    @property
    def _began(self) -> float:
        """When the device began the oldest step."""
        return max(self._in_flight[0].launched_at, self._last_result_at)

    def launch(self, plan: StepPlan, expected: float = 0.0, planned_at: float | None = None) -> Iterator[Result]:
        """Start a step, and yield the results of earlier steps that would else wait for its launch. Iterate to the end.

        It takes ``expected`` seconds, and its plan was begun at ``planned_at``. An empty step is dropped.
        """
        if not plan.has_orders:
            return
        if self._delays_result(plan):
            yield self.take_oldest()
        launched_at = time.perf_counter()
        self.expected = expected + sum(step.expected for step in self._in_flight)
        launch = self._ranks.launch_with_pauses(plan)
        while True:
            try:
                next(launch)
            except StopIteration as end:
                self._in_flight.append(_Step(plan, end.value, launched_at, expected))
                self._measure_lead(planned_at)
                return
            self._measure_lead(planned_at)
            planned_at = None
            if self._in_flight and self._ranks.oldest_is_done():
                yield self.take_oldest()

    def _measure_lead(self, planned_at: float | None) -> None:
        if planned_at is not None:
            seconds = max(time.perf_counter() - planned_at + _LEAST_LEAD, self._lead * _LEAD_DECAY)
            self._lead = min(seconds, _MOST_LEAD)

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
        self.step_seconds = now - max(oldest.launched_at, self._last_result_at)
        self._last_result_at = now
        return oldest.plan, output
