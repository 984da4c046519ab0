"""A real decode node over gRPC with a real prefill node: exact tokens, one end per request, no leaked blocks."""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
import pytest
from machine import patience
from node_client import WAIT_SECONDS, RouterClient, greedy
from node_fleet import Nodes

from pdserve.pb import pdserve_pb2 as pb
from pdserve.sampling_params import SamplingParams

BLOCK = 8


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, 128) for _ in range(length)]


@pytest.mark.parametrize("length", [32, 39, 40, 41, 300])
def test_tokens_after_a_handoff_equal_local_ones(length: int, nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        prompt = prompt_of(length)
        local = client.generate(prompt, greedy(12), cache_salt="local").tokens
        read = nodes.counter("kv_read_bytes")
        failed = nodes.counter("handoff_failures")
        assert client.generate(prompt, greedy(12), nodes.main).tokens == local
        assert nodes.counter("kv_read_bytes") > read
        # Once more: now D has all but the end of it.
        again = client.generate(prompt, greedy(12), nodes.main)
        assert again.tokens == local
    assert nodes.counter("handoff_failures") == failed


def test_choices_share_one_handoff(nodes: Nodes) -> None:
    sampling = SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=11, ignore_eos=True, logprobs=2)
    prompt = prompt_of(100, seed=1)
    with RouterClient(nodes.decode.address) as client:
        local = client.generate(prompt, sampling, cache_salt="local")
        handoffs = nodes.counter("handoffs")
        remote = client.generate(prompt, sampling, nodes.main)
    assert remote.choices == local.choices
    assert [len(tokens) for tokens in remote.choices.values()] == [10, 10, 10]
    assert len({tuple(tokens) for tokens in remote.choices.values()}) == 3
    assert remote.finish == local.finish == {0: "length", 1: "length", 2: "length"}
    for choice in range(3):
        assert [entry.top_ids for entry in remote.logprobs[choice]] == [
            entry.top_ids for entry in local.logprobs[choice]
        ]
    assert nodes.counter("handoffs") == handoffs + 1


@pytest.mark.parametrize("by", ["max_tokens", "stop"])
def test_a_request_that_ends_with_its_first_token_reads_nothing(by: str, nodes: Nodes) -> None:
    prompt = prompt_of(64, seed=2)
    with RouterClient(nodes.decode.address) as client:
        first = client.generate(prompt, greedy(1), cache_salt="local").tokens
        before = nodes.counter("kv_read_bytes")
        sampling = greedy(1) if by == "max_tokens" else greedy(5, stop_token_ids=tuple(first))
        result = client.generate(prompt, sampling, nodes.main)
    assert result.tokens == first
    assert result.finish[0] == ("length" if by == "max_tokens" else "stop")
    nodes.decode.wait_idle()
    nodes.prefill.wait_idle()
    assert nodes.counter("kv_read_bytes") == before


def test_a_choice_that_ends_with_its_first_token_does_not_end_the_others(nodes: Nodes) -> None:
    sampling: dict[str, Any] = {"max_tokens": 6, "n": 4, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    prompt = prompt_of(48, seed=3)
    with RouterClient(nodes.decode.address) as client:
        free = client.generate(prompt, SamplingParams(**sampling), cache_salt="local")
        stop = free.choices[0][0]
        stopping = SamplingParams(**sampling, stop_token_ids=(stop,))
        local = client.generate(prompt, stopping, cache_salt="local")
        remote = client.generate(prompt, stopping, nodes.main)
    assert remote.choices == local.choices
    assert remote.finish == local.finish
    assert remote.choices[0] == [stop]


def test_short_and_cached_prompts_are_prefilled_on_d(nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        handoffs = nodes.counter("handoffs")
        local = nodes.counter("local_prefills")
        client.generate(prompt_of(31, seed=4), greedy(2), nodes.main)
        long = prompt_of(200, seed=4)
        client.generate(long, greedy(2))  # fills the prefix cache
        client.generate([*long[:192], 5, 6, 7], greedy(2), nodes.main)
        assert nodes.counter("handoffs") == handoffs
        assert nodes.counter("local_prefills") == local + 3


def test_only_uncached_blocks_are_read(nodes: Nodes) -> None:
    block_bytes = 2 * 2 * 2 * BLOCK * 32 * 4  # layers, heads, K and V, tokens, head size, float32
    prefix = prompt_of(80, seed=5)
    with RouterClient(nodes.decode.address) as client:
        client.generate(prefix, greedy(2))
        before = nodes.counter("kv_read_bytes")
        client.generate([*prefix, *prompt_of(64, seed=6)], greedy(8), nodes.main)  # P samples some, D the rest
        assert nodes.counter("kv_read_bytes") == before + 64 // BLOCK * block_bytes


def test_an_unknown_prefill_node_is_recomputed_or_fails_by_policy(nodes: Nodes) -> None:
    prompt = prompt_of(64, seed=7)
    with RouterClient(nodes.decode.address) as client:
        expected = client.generate(prompt, greedy(4), cache_salt="local").tokens
        assert client.generate(prompt, greedy(4), "unknown:1").tokens == expected
    with RouterClient(nodes.strict.address) as client:
        failure = client.generate(prompt, greedy(4), "unknown:1").failure
        assert failure is not None
        assert failure.code == pb.Failure.NODE_FAILED
        assert "unknown:1" in failure.message


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([], {}, ["0 tokens"]),
        (b"abc", {}, ["3 bytes"]),
        ([1, 999], {}, ["999", "127"]),
        ([1] * 510, {"max_tokens": 3}, ["510", "513", "512"]),
        ([1], {"top_p": 0.0}, ["top_p"]),
    ],
)
def test_an_invalid_request_fails_alone(
    prompt: list[int] | bytes, fields: dict[str, Any], words: list[str], nodes: Nodes
) -> None:
    with RouterClient(nodes.decode.address) as client:
        other = client.send(prompt_of(40), greedy(30))
        failure = client.generate(prompt, greedy(**{"max_tokens": 4, **fields}), nodes.main).failure
        assert failure is not None
        assert failure.code == pb.Failure.INVALID
        for word in words:
            assert word in failure.message
        assert len(other.wait().tokens) == 30


def test_a_request_ends_at_its_deadline_in_every_stage(nodes: Nodes) -> None:
    nodes.proxy.before_event = lambda kind: time.sleep(1.0 if kind == "first_tokens" else 0.0)
    with RouterClient(nodes.decode.address) as client:
        waiting = client.send(prompt_of(64, seed=8), greedy(4), nodes.main, timeout_ms=200)
        running = client.send(prompt_of(16, seed=8), greedy(490), timeout_ms=60)
        for result in (waiting, running):
            failure = result.wait().failure
            assert failure is not None
            assert failure.code == pb.Failure.DEADLINE
        assert waiting.choices == {}


def test_deadline_passes_during_a_pause(nodes: Nodes) -> None:
    """Requests are paused on arrival, while they compute, and while they decode; one arrives paused."""
    with RouterClient(nodes.decode.address) as client:
        arrived = client.send(prompt_of(64, seed=9), greedy(4), nodes.main, timeout_ms=1500, paused=True)
        early = client.send(prompt_of(64, seed=10), greedy(440), nodes.main, timeout_ms=1500)
        client.put(pb.ServeRequest(pause=pb.Pause(request=early.number)))
        late = client.send(prompt_of(16, seed=9), greedy(490, n=3), timeout_ms=1500)
        late.started.wait(patience(WAIT_SECONDS))
        client.put(pb.ServeRequest(pause=pb.Pause(request=late.number)))
        for result in (arrived, early, late):
            failure = result.wait().failure
            assert failure is not None
            assert failure.code == pb.Failure.DEADLINE
            client.put(pb.ServeRequest(resume=pb.Resume(request=result.number)))
        assert 0 < sum(map(len, late.choices.values())) < 3 * 490
        nodes.decode.wait_idle()
        assert len(client.generate(prompt_of(16, seed=9), greedy(5)).tokens) == 5


def test_cancelled_requests_emit_nothing_and_hold_no_blocks(nodes: Nodes) -> None:
    rng = random.Random(0)
    with RouterClient(nodes.decode.address) as client:
        results = []
        for index in range(60):
            prefill_node = nodes.main if index % 4 else ""
            results.append(client.send(prompt_of(rng.choice([20, 60, 150]), index), greedy(40), prefill_node))
            if index % 2:
                time.sleep(rng.random() * 0.01)
                client.cancel(results[-1])
        kept = [result for index, result in enumerate(results) if not index % 2]
        for result in kept:
            result.wait()
        assert all(r.failure is None or r.failure.code == pb.Failure.OVERLOADED for r in kept)
        nodes.decode.wait_idle()
        nodes.prefill.wait_idle()


def test_the_end_of_a_stream_ends_its_requests(nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        running = [client.send(prompt_of(50, seed), greedy(400), nodes.main) for seed in range(4)]
        for result in running:
            result.started.wait(patience(20.0))
    nodes.decode.wait_idle()
    nodes.prefill.wait_idle()


def test_a_half_closed_stream_finishes_its_requests(nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        result = client.send(prompt_of(50, seed=9), greedy(50), nodes.main)
        client.half_close()
        assert len(result.wait().tokens) == 50
        client.join()
        assert client.error is None


def test_a_repeated_request_number_ends_the_stream(nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        client.send(prompt_of(20), greedy(400))
        client.send(prompt_of(20), greedy(400), number=1)
        client.join()
        assert client.error is not None
        assert client.error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_outputs_of_a_step_travel_in_one_message(nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        results = [client.send(prompt_of(20, seed), greedy(40)) for seed in range(8)]
        for result in results:
            result.wait()
        assert client.num_batches < 8 * 40 / 2
