"""Handoffs between real prefill and decode engines and a connector, with faults at every stage."""

from __future__ import annotations

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import STAGES, ScriptedJob, ScriptedWorld
from toy import reference
from toy_node import DEPTHS

from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams

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
@examples(30)
def test_tokens_are_exact_with_a_fault_at_any_stage(
    depth: tuple[int, int], requests: list[tuple[int, int, int, bool, str, str, int]]
) -> None:
    """Handed over, given up, cancelled, broken or expired: tokens are right and all blocks are freed.

    Most prompts take several steps on P and are read meanwhile.
    """
    jobs = [
        ScriptedJob(
            [7 if shared else rid] * length,
            SamplingParams(max_tokens=max_tokens, n=n),
            what=what,
            when=when,
            ahead=ahead,
        )
        for rid, (length, max_tokens, n, shared, what, when, ahead) in enumerate(requests)
    ]
    world = ScriptedWorld(depth, (96, 72), jobs)
    world.run()
    world.close()


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
            st.booleans(),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=8,
    )
)
@examples(30)
def test_tokens_are_exact_with_digests(
    depth: tuple[int, int], requests: list[tuple[int, int, bool, str, str, int, bool, int]]
) -> None:
    """Also if wrong digests are announced from some stage on. Some are pulled, in the middle of their output."""
    jobs = [
        ScriptedJob(
            [7 if shared else rid] * length,
            SamplingParams(max_tokens=6, n=n),
            what=what,
            when=when,
            ahead=ahead,
            pull=pull,
            done=4 if pull else 0,
            arrival=10 if pull else 0,
            beside=beside,
        )
        for rid, (length, n, shared, what, when, ahead, pull, beside) in enumerate(requests)
    ]
    world = ScriptedWorld(depth, (96, 72), jobs, checksum=True)
    world.run()
    world.close()


@each_depth
@pytest.mark.parametrize("length", [4, 16, 30, 59])
def test_blocks_that_changed_after_their_announcement_are_not_used(depth: tuple[int, int], length: int) -> None:
    job = ScriptedJob([3] * length, SamplingParams(max_tokens=6), what="overwrite", when="leased")
    world = ScriptedWorld(depth, (96, 72), [job], checksum=True)
    world.run()
    assert world.d.node.runner.num_tokens == length + 5, "D has computed the prompt itself"
    world.close()


@st.composite
def jobs(draw: st.DrawFn) -> ScriptedJob:
    prompt = [draw(st.integers(5, 8))] * draw(st.integers(1, 24) | st.integers(25, 36))
    stop_at = draw(st.integers(0, 10))
    return ScriptedJob(
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
        pull=draw(st.booleans()),
        beside=draw(st.integers(0, 4)),
    )


@each_depth
@given(jobs=st.lists(jobs(), min_size=1, max_size=10), blocks=st.tuples(st.integers(12, 32), st.integers(12, 32)))
@examples(40)
def test_tokens_are_exact_with_a_fault_at_any_time(
    depth: tuple[int, int], jobs: list[ScriptedJob], blocks: tuple[int, int]
) -> None:
    """With arrivals, stops, preemption, shared prefixes and steps in flight on both nodes.

    Some requests are new, others resume the output of another D. What is pulled is cached on P in part, or no more.
    """
    world = ScriptedWorld(depth, blocks, jobs)
    world.run()
    world.close()


@each_depth
@pytest.mark.parametrize("num_blocks", [16, 17, 18])
def test_a_prompt_for_a_peer_is_not_preempted(depth: tuple[int, int], num_blocks: int) -> None:
    """P lacks blocks for a decoding sequence: blocks that D may read cannot be freed for it."""
    job = ScriptedJob(list(range(100, 160)), SamplingParams(max_tokens=6))
    world = ScriptedWorld(depth, (num_blocks, 36), [job])
    world.p.node.submit(99, [1] * 3, SamplingParams(max_tokens=20), Mode.LOCAL)
    world.run()
    assert world.p.node.tokens[99, 0] == reference([1] * 3, 0, 20)
    world.close()


@each_depth
def test_a_resumed_stream_reads_the_kv_of_its_output(depth: tuple[int, int]) -> None:
    """D computes the output's last token, and the tokens that follow."""
    job = ScriptedJob(list(range(100, 130)), SamplingParams(max_tokens=12), done=8)
    world = ScriptedWorld(depth, (96, 72), [job])
    world.run()
    assert world.d.node.runner.num_tokens == 4
    world.close()


@each_depth
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize("cached", [0, 12])
def test_all_choices_of_a_moved_request_go_on_behind_a_split(depth: tuple[int, int], beside: int, cached: int) -> None:
    """D computes the first blocks of the prompt while it pulls the others: P has them, or nothing."""
    jobs = [ScriptedJob([5] * cached, SamplingParams(max_tokens=1))] if cached else []
    moved = SamplingParams(max_tokens=5, n=2)
    jobs.append(ScriptedJob([6 - bool(cached)] * 12, moved, arrival=8, done=1, pull=True, beside=beside))
    world = ScriptedWorld(depth, (24, 24), jobs)
    world.run()
    world.close()
