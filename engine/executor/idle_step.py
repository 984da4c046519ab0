"""The time of a decode step of one sequence, measured before a node serves: the default ``--itl-target`` follows it."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from engine.executor.rank import Ranks
from engine.executor.step_pipeline import StepPipeline
from pdserve.kv.states import NO_SLOT
from pdserve.records import NO_STEP, TOKEN_BYTES, NewSequence, ScheduledSequence, StepPlan
from pdserve.sampling_params import SamplingParams

_STEPS = 16
_SECONDS = 0.25  # on slow devices fewer steps are enough
_SEQ = -1  # the scheduler counts from 0


def measure_idle_step(ranks: Ranks) -> float:
    """Return the median seconds of decode steps, each launched while the last ones are in flight, as when serving.

    They write to the first blocks and the first slot of recurrent state, which hold nothing yet.
    """
    layout = ranks.kv_layout
    num_groups = layout.groups.num_groups
    count = min((_STEPS + 1) // layout.block_size + 1, layout.num_blocks // num_groups)
    blocks = tuple(range(count * num_groups))
    most = min(_STEPS, count * layout.block_size - 1)
    slot = NO_SLOT if ranks.state_layout is None else 0
    sampling = SamplingParams(max_tokens=most + 1, temperature=0.0)
    new = NewSequence(_SEQ, bytes(TOKEN_BYTES), 1, 0, blocks, sampling, state_slot=slot)
    pipeline = StepPipeline(ranks)
    seconds = list[float]()
    token = (ScheduledSequence.decode(_SEQ),)
    start = perf_counter()
    for number in range(most):
        plan = StepPlan(NO_STEP - 1 - number, new=() if number else (new,), scheduled=token, num_decodes=1)
        for _ in pipeline.launch(plan):
            seconds.append(pipeline.step_seconds)
        if pipeline.take(plan) is not None:
            seconds.append(pipeline.step_seconds)
        if seconds and perf_counter() - start > _SECONDS:
            break
    while not pipeline.empty:
        pipeline.take_oldest()
        seconds.append(pipeline.step_seconds)
    for _ in pipeline.launch(StepPlan(NO_STEP - 1 - most, finished=(_SEQ,))):
        raise AssertionError("a step is in flight after the last one was taken")
    pipeline.take_oldest()
    return median(seconds)
