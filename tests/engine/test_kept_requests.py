"""Weights that change under running requests: these go on with the KV that they have, and nothing else reads it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import next_token
from toy_node import DEPTHS, Make, Node

from pdserve.ipc.messages import ChangeWeights, KVConfirmed, Mode, Pause, Resume
from pdserve.records import SamplingParams
from pdserve.weight_change import WeightChange

CHANGE = ChangeWeights(WeightChange("b"))
PROMPT = list(range(30))


def versions(prompt: list[int], choice: int, output: list[int], most: int) -> list[int]:
    """Return the lowest possible version of the weights of each token; they never decrease."""
    found = [0]
    for at, token in enumerate(output):
        before = np.array(prompt + output[:at])
        found.append(next(v for v in range(found[-1], most + 1) if next_token(before, choice, v) == token))
    return found[1:]


@pytest.mark.parametrize("depth", DEPTHS)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    changes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    pauses=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7), st.booleans()), max_size=10),
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(1, 8),
    layered=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_only_sequences_that_decode_read_kv_of_older_weights(
    depth: tuple[int, int],
    requests: list[tuple[int, int, int, int, bool]],
    changes: list[int],
    pauses: list[tuple[int, int, bool]],
    num_blocks: int,
    max_num_seqs: int,
    layered: bool,
) -> None:
    """Change weights at any step. The toy runner asserts that no sequence reads KV from before it was new."""
    node = Node(num_blocks, *depth, max_num_seqs=max_num_seqs, layered=layered)
    for step in range(31):
        for rid, (begins, length, max_tokens, n, shared) in enumerate(requests):
            if begins == step:
                sampling = SamplingParams(max_tokens=max_tokens, n=n)
                node.submit(rid, [7 if shared else rid] * length, sampling, Mode.LOCAL)
        for at, rid, paused in pauses:
            if at == step:
                node.obey(Pause(rid) if paused else Resume(rid))
        for _ in range(changes.count(step)):
            node.obey(CHANGE)
        node.step()
    for rid in range(len(requests)):
        node.obey(Resume(rid))
    node.run()
    assert node.runner.weights == len(changes)
    for rid, (_, length, max_tokens, n, shared) in enumerate(requests):
        for choice in range(n):
            output = node.tokens[rid, choice]
            assert len(output) == max_tokens
            versions([7 if shared else rid] * length, choice, output, len(changes))
    node.assert_all_free()
    node.close()


def test_kept_sequence_keeps_its_kv_and_leaves_nothing_in_the_prefix_cache(make: Make) -> None:
    node = make(40)
    node.submit(0, PROMPT, SamplingParams(max_tokens=20), Mode.LOCAL)
    while len(node.tokens[0, 0]) < 4:
        node.step()
    node.obey(CHANGE)
    computed = node.runner.num_tokens
    node.run()
    output = node.tokens[0, 0]
    assert node.runner.num_tokens - computed == 20 - versions(PROMPT, 0, output, 1).count(0)
    assert set(versions(PROMPT, 0, output, 1)) == {0, 1}
    for rid, prompt, cached in ((1, PROMPT + output[:2], 0), (2, PROMPT + output, 32)):
        computed = node.runner.num_tokens
        node.submit(rid, prompt, SamplingParams(max_tokens=1), Mode.LOCAL)
        node.run()
        assert node.runner.num_tokens - computed == len(prompt) - cached
        assert node.tokens[rid, 0] == [next_token(np.array(prompt), 0, 1)]


def test_prompt_that_is_half_computed_starts_over(make: Make) -> None:
    node = make(40)
    node.submit(0, PROMPT, SamplingParams(max_tokens=5, prompt_logprobs=0), Mode.LOCAL)
    node.step()
    node.obey(CHANGE)
    node.run()
    assert versions(PROMPT, 0, node.tokens[0, 0], 1) == [1] * 5


def test_kv_that_a_peer_computed_before_the_change_is_dropped(make: Make) -> None:
    """The frontend confirms a handoff whose prompt is cached; P has sampled and D has sent its first token."""
    node = make(40)
    for rid in (0, 1):
        node.submit(rid, PROMPT, SamplingParams(max_tokens=5), Mode.HANDOFF)
    node.step()
    assert node.scheduler.status().reading == 2
    node.obey(CHANGE)
    first = next_token(np.array(PROMPT), 0)
    for rid in (0, 1):
        node.obey(KVConfirmed(rid, ((first,),)))
    node.run()
    for rid in (0, 1):
        assert versions(PROMPT, 0, [first, *node.tokens[rid, 0]], 1) == [0, 1, 1, 1, 1]
    node.assert_all_free()


def test_requests_end_when_a_change_leaves_no_weights(make: Make) -> None:
    node = make(12, max_num_seqs=1)
    for rid in (0, 1):
        node.submit(rid, PROMPT, SamplingParams(max_tokens=9), Mode.LOCAL)
    for _ in range(5):
        node.step()
    node.runner.fails_change = True
    node.obey(CHANGE)
    refused = [each for batch in node.received() for each in batch.refused]
    assert sorted((each.rid, each.kind) for each in refused) == [(0, "NodeError"), (1, "NodeError")]
    node.run()
    node.assert_all_free()
    node.obey(CHANGE)
    node.submit(2, PROMPT, SamplingParams(max_tokens=3), Mode.LOCAL)
    node.run()
    assert versions(PROMPT, 0, node.tokens[2, 0], 1) == [1] * 3
