"""Requests through prefill and decode engines with a real connector between them, whatever goes wrong, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import reference
from toy_fleet import STAGES, Fleet, Job
from toy_node import Node

from engine.messages import Mode
from pdserve.records import SamplingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 24),
            st.integers(2, 10),
            st.integers(1, 3),
            st.booleans(),
            st.sampled_from(["cancel", "give up"]),
            st.sampled_from(["never", *STAGES]),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_handoff_is_exact_at_whatever_stage_it_goes_wrong(
    depth: int, requests: list[tuple[int, int, int, bool, str, str]]
) -> None:
    """Handed over, given up or cancelled at any stage: right tokens, and every block comes back on both sides."""
    jobs = [
        Job([7 if shared else rid] * length, SamplingParams(max_tokens=max_tokens, n=n), what=what, when=when)
        for rid, (length, max_tokens, n, shared, what, when) in enumerate(requests)
    ]
    fleet = Fleet(Node(48, depth), Node(36, depth), jobs)
    fleet.run()
    fleet.close()


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    prompt = [draw(st.integers(5, 8))] * draw(st.integers(1, 24))
    stop_at = draw(st.integers(0, 10))
    return Job(
        prompt,
        SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            n=draw(st.integers(1, 3)),
            stop_token_ids=tuple(reference(prompt, 0, stop_at)[-1:]),
        ),
        mode=draw(st.sampled_from([Mode.HANDOFF, Mode.LOCAL])),
        arrival=draw(st.integers(0, 20)),
        what=draw(st.sampled_from(["cancel", "give up"])),
        when=draw(st.integers(0, 20) | st.just("never")),
    )


@DEPTHS
@given(jobs=st.lists(jobs(), min_size=1, max_size=10), blocks=st.tuples(st.integers(10, 30), st.integers(10, 30)))
@settings(max_examples=150, deadline=None)
def test_handoff_is_exact_at_whatever_time_it_goes_wrong(depth: int, jobs: list[Job], blocks: tuple[int, int]) -> None:
    """Under arrivals, stops, preemption and shared prefixes, with steps in flight on either side."""
    fleet = Fleet(Node(blocks[0], depth), Node(blocks[1], depth), jobs)
    fleet.run()
    fleet.close()
