"""A stream to a node cannot change the requests of other streams, whatever numbers it knows or guesses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet import NodeProcess
from machine import patience
from node_client import PrefillClient, RouterClient, greedy
from stages import BLOCK, Pair, held_at, send_prompt, start_pair
from test_streamed_handoff import prompt_of

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb

SMALL_CACHE = ("--kv-cache-memory", "2MiB")  # a few prompts overwrite all blocks
VICTIMS = 4


@pytest.fixture(scope="module")
def started(checkpoint: Path) -> Iterator[Pair]:
    with start_pair(checkpoint, prefill_flags=SMALL_CACHE) as pair:
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """After each test, the next request is served with a handoff."""
    yield started
    started.proxy.reset()
    started.check_served()


def claims_on_p(number: int) -> list[pb.HandoffRequest]:
    """Return a message of each kind that names a prompt by its number."""
    return [
        pb.HandoffRequest(release=pb.ReleaseRequest(request=number)),
        pb.HandoffRequest(extend=pb.ExtendRequest(request=number, ask=1)),
    ]


def claims_on_d(number: int) -> list[pb.ServeRequest]:
    """Return a message of each kind that names a request by its number."""
    return [
        pb.ServeRequest(cancel=pb.Cancel(request=number)),
        pb.ServeRequest(pause=pb.Pause(request=number)),
        pb.ServeRequest(resume=pb.Resume(request=number)),
    ]


def end_of(client: PrefillClient | RouterClient) -> grpc.StatusCode:
    """Wait until the node has ended the stream; return the status."""
    client.join()
    assert client.error is not None, "the stream ended without an error"
    return client.error.code()


def overwrite_free_blocks(node: NodeProcess) -> None:
    """Compute other prompts until every free block of P has held their KV."""
    epoch = node.describe().epoch
    with PrefillClient(node.address) as client:
        for seed in range(3 * node.status().total_blocks * BLOCK // 1000):
            tokens = pack_tokens(prompt_of(1000 + seed, 480))
            request = pb.PrefillRequest(epoch=epoch, token_ids=tokens, sampling=sampling_to_pb(greedy(1)))
            prefill = client.send(request)
            prefill.all()
            client.release(prefill)


def test_release_and_extend_of_another_stream_change_no_token(pair: Pair) -> None:
    """The hostile streams run when all blocks of four prompts are announced, and before D has read the last ones."""
    prompts = [prompt_of(70 + seed, 200) for seed in range(VICTIMS)]
    messages = [message for number in range(30) for message in claims_on_p(number)]
    computed = threading.Semaphore(0)
    attacked = threading.Event()

    def hold(kind: str) -> None:
        if kind == "first_tokens":  # the last part follows
            computed.release()
            assert attacked.wait(patience(60.0))

    with RouterClient(pair.decode.address) as client:
        expected = [client.generate(prompt, greedy(40), cache_salt="local").tokens for prompt in prompts]
        failures = pair.decode.counter("handoff_failures")
        violations = pair.prefill.counter("stream_violations")
        pair.proxy.before_event = hold
        results = [client.send(prompt, greedy(40), pair.prefill.address, cache_salt="read") for prompt in prompts]
        for _ in results:
            assert computed.acquire(timeout=patience(30.0))
        for message in messages:
            with PrefillClient(pair.prefill.address) as hostile:
                hostile.put(message)
                assert end_of(hostile) is grpc.StatusCode.INVALID_ARGUMENT
        overwrite_free_blocks(pair.prefill)  # with prompts that have the victims' numbers on their own stream
        attacked.set()
        assert [result.wait().tokens for result in results] == expected
        assert pair.decode.counter("handoff_failures") == failures
        assert [client.generate(prompt, greedy(40), cache_salt="read").tokens for prompt in prompts] == expected
    assert pair.prefill.counter("stream_violations") == violations + len(messages)
    assert "was never sent on this stream" in pair.prefill.output
    assert pair.prefill.output.count("broke the protocol") < len(messages) / 4, "the log is rate-limited"


def test_cancel_and_pause_of_another_stream_change_no_request(pair: Pair) -> None:
    messages = [message for number in range(5) for message in claims_on_d(number)]
    violations = pair.decode.counter("stream_violations")
    with held_at("decoding", pair) as held:
        for message in messages:
            with RouterClient(pair.decode.address) as hostile:
                hostile.put(message)
                assert end_of(hostile) is grpc.StatusCode.INVALID_ARGUMENT
        with RouterClient(pair.decode.address) as hostile:
            own = [send_prompt(hostile, pair) for _ in range(held.result.number)][-1]
            assert own.number == held.result.number
            hostile.cancel(own)
        held.release()
        assert held.result.wait().tokens == pair.expected
    assert pair.decode.counter("stream_violations") == violations + len(messages)


def test_killed_engine_during_handoffs_leaves_no_traceback_in_the_log(pair: Pair) -> None:
    """P fails its prompts and closes its leases, before gRPC cancels its streams."""
    with RouterClient(pair.decode.address) as client:
        pair.prefill.stop("engine")
        failures = pair.decode.counter("handoff_failures")
        results = [send_prompt(client, pair) for _ in range(3)]
        pair.decodes.wait_until(lambda: pair.decode.status().held_blocks > 0, 10.0)
        for process in pair.prefill.processes("engine"):
            process.kill()
        pair.prefill.wait_ended(10.0)
        for result in results:
            assert result.wait().tokens == pair.expected
        assert pair.decode.counter("handoff_failures") > failures
        assert "Traceback" not in pair.prefill.output
        assert "prompts without a Release" not in pair.prefill.output  # all have failed before
    pair.prefill.restart()
