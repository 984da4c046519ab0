"""Two nodes that prefill for each other on full caches never wait for each other. See docs/leases.md."""

from __future__ import annotations

from itertools import product

import pytest
from crossing_world import CrossingWorld
from fast_set import examples
from hypothesis import example, given
from hypothesis import strategies as st
from lease_sides import Job
from toy_node import BLOCK, DEPTHS

from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams

Arrival = tuple[int, int, Job]  # step, index of the node, request

NUM_BLOCKS = 6


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = [draw(st.integers(1, 900))] * draw(st.integers(1, (NUM_BLOCKS - 1) * BLOCK))
    sampling = SamplingParams(max_tokens=draw(st.integers(1, NUM_BLOCKS * BLOCK - len(prompt))))
    job = Job(prompt, sampling, draw(st.sampled_from([Mode.HANDOFF, Mode.HANDOFF, Mode.LOCAL])), ahead=2)
    return draw(st.integers(0, 12)), draw(st.integers(0, 1)), job


def whole_cache(index: int, prompt: int = 1) -> Arrival:
    """A request that needs nearly all blocks of its node."""
    return 0, index, Job([prompt + index] * (NUM_BLOCKS - 1) * BLOCK, SamplingParams(max_tokens=2))


@given(
    depth=st.sampled_from(DEPTHS),
    max_num_seqs=st.sampled_from([1, 2, 8]),
    requests=st.lists(arrivals(), min_size=2, max_size=8),
)
@example((1, 1), 8, [whole_cache(0), whole_cache(1)])
@example((2, 1), 1, [(0, 0, Job([1], SamplingParams(max_tokens=2))), (0, 1, Job([2], SamplingParams(max_tokens=2)))])
@examples(60)
def test_crossing_handoffs_end(depth: tuple[int, int], max_num_seqs: int, requests: list[Arrival]) -> None:
    world = CrossingWorld(depth, NUM_BLOCKS, max_num_seqs)
    world.run(requests)
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_every_crossing_of_four_requests_ends(depth: tuple[int, int], max_num_seqs: int) -> None:
    """All sizes of two requests to each node, and all orders of their arrival within a few steps."""
    lengths = [BLOCK, 3 * BLOCK, (NUM_BLOCKS - 1) * BLOCK]
    steps = [0, 1, 3]
    nodes = (0, 0, 1, 1)
    for sizes in product(lengths, repeat=4):
        for times in product(steps, repeat=3):
            requests = [
                (step, index, Job([10 + number] * size, SamplingParams(max_tokens=2)))
                for number, (step, index, size) in enumerate(zip((0, *times), nodes, sizes, strict=True))
            ]
            world = CrossingWorld(depth, NUM_BLOCKS, max_num_seqs)
            world.run(requests)
            world.close()
