"""Requests through prefill and decode engines with a real connector between them, whatever goes wrong, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import reference
from toy_fleet import STAGES, Fleet, Job
from toy_node import DEPTHS, Node

from engine.ipc.messages import Mode
from pdserve.records import SamplingParams

each_depth = pytest.mark.parametrize("depth", DEPTHS, ids=str)


@each_depth
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(2, 10),
            st.integers(1, 3),
            st.booleans(),
            st.sampled_from(["cancel", "give up", "break", "expire"]),
            st.sampled_from(["never", *STAGES]),
            st.sampled_from([0, 0, 1, 9]),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=50, deadline=None)
def test_handoff_is_exact_at_whatever_stage_it_goes_wrong(
    depth: tuple[int, int], requests: list[tuple[int, int, int, bool, str, str, int]]
) -> None:
    """Handed over, given up, cancelled, broken or expired at any stage: right tokens, and every block comes back.

    Most prompts take several steps on P, and are read while it computes.
    """
    jobs = [
        Job(
            [7 if shared else rid] * length,
            SamplingParams(max_tokens=max_tokens, n=n),
            what=what,
            when=when,
            ahead=ahead,
        )
        for rid, (length, max_tokens, n, shared, what, when, ahead) in enumerate(requests)
    ]
    fleet = Fleet(Node(96, *depth), Node(72, *depth), jobs)
    fleet.run()
    fleet.close()


@each_depth
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 3),
            st.booleans(),
            st.sampled_from(["cancel", "give up", "break", "expire", "corrupt"]),
            st.sampled_from(["never", *STAGES]),
            st.sampled_from([0, 0, 1, 9]),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=30, deadline=None)
def test_with_digests_it_is_exact_too(
    depth: tuple[int, int], requests: list[tuple[int, int, bool, str, str, int]]
) -> None:
    """Also where they are announced wrong from some stage on."""
    jobs = [
        Job([7 if shared else rid] * length, SamplingParams(max_tokens=6, n=n), what=what, when=when, ahead=ahead)
        for rid, (length, n, shared, what, when, ahead) in enumerate(requests)
    ]
    fleet = Fleet(Node(96, *depth, kv_checksum=True), Node(72, *depth, kv_checksum=True), jobs)
    fleet.run()
    fleet.close()


@each_depth
@pytest.mark.parametrize("length", [4, 16, 30, 59])
def test_blocks_that_are_no_longer_what_was_announced_are_not_used(depth: tuple[int, int], length: int) -> None:
    job = Job([3] * length, SamplingParams(max_tokens=6), what="overwrite", when="leased")
    fleet = Fleet(Node(96, *depth, kv_checksum=True), Node(72, *depth, kv_checksum=True), [job])
    fleet.run()
    assert fleet.d.runner.num_tokens == length + 5, "it has computed the prompt itself"
    fleet.close()


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    prompt = [draw(st.integers(5, 8))] * draw(st.integers(1, 24) | st.integers(25, 36))
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
        what=draw(st.sampled_from(["cancel", "give up", "break", "expire"])),
        when=draw(st.integers(0, 20) | st.just("never")),
        done=draw(st.integers(0, 11)),
        ahead=draw(st.sampled_from([0, 1, 3, 20])),
    )


@each_depth
@given(jobs=st.lists(jobs(), min_size=1, max_size=10), blocks=st.tuples(st.integers(12, 32), st.integers(12, 32)))
@settings(max_examples=80, deadline=None)
def test_handoff_is_exact_at_whatever_time_it_goes_wrong(
    depth: tuple[int, int], jobs: list[Job], blocks: tuple[int, int]
) -> None:
    """Under arrivals, stops, preemption and shared prefixes, with steps in flight on either side.

    Some requests are new, others go on behind what another D has brought.
    """
    fleet = Fleet(Node(blocks[0], *depth), Node(blocks[1], *depth), jobs)
    fleet.run()
    fleet.close()


@each_depth
@pytest.mark.parametrize("num_blocks", [16, 17, 18])
def test_a_prompt_that_a_peer_waits_for_does_not_make_way(depth: tuple[int, int], num_blocks: int) -> None:
    """P lacks blocks for a sequence that decodes there: the prompt's could not be freed, since D may read them."""
    job = Job(list(range(100, 160)), SamplingParams(max_tokens=6))
    fleet = Fleet(Node(num_blocks, *depth), Node(36, *depth), [job])
    fleet.p.submit(99, [1] * 3, SamplingParams(max_tokens=20), Mode.LOCAL)
    fleet.run()
    assert fleet.p.tokens[99, 0] == reference([1] * 3, 0, 20)
    fleet.close()
