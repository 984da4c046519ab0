"""A real prefill node over gRPC: leases begin, end and are never mistaken for others."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest
from node_client import greedy, prefill_stub
from node_fleet import Nodes

from pdserve.compat import PROTOCOL_VERSION
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import SamplingParams
from pdserve.wire import pack_tokens, sampling_to_pb

BLOCK = 8
PROMPT = list(range(3, 43))  # 5 blocks


def prefill_request(
    epoch: str, prompt: list[int] | bytes = PROMPT, sampling: SamplingParams | None = None, skip_tokens: int = 0
) -> pb.PrefillRequest:
    return pb.PrefillRequest(
        epoch=epoch,
        token_ids=prompt if isinstance(prompt, bytes) else pack_tokens(prompt),
        sampling=sampling_to_pb(sampling or greedy(4)),
        skip_tokens=skip_tokens,
    )


def run(stub: pb_grpc.PrefillNodeStub, request: pb.PrefillRequest) -> tuple[pb.Accepted, pb.FirstTokens, pb.KVReady]:
    events = {event.WhichOneof("kind"): event for event in stub.Prefill(request, timeout=20.0)}
    return events["accepted"].accepted, events["first_tokens"].first_tokens, events["kv_ready"].kv_ready


def test_a_prompt_becomes_a_lease_until_it_is_released(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with prefill_stub(nodes.prefill.address) as stub:
        accepted, first, ready = run(stub, prefill_request(epoch))
        assert len(first.choices) == 1
        assert ready.num_tokens == len(PROMPT)
        assert len(ready.block_ids) == len(set(ready.block_ids)) == len(PROMPT) // BLOCK
        assert ready.lease == accepted.lease
        assert nodes.prefill.status().leased_blocks == len(ready.block_ids)
        release = pb.ReleaseRequest(epoch=epoch, lease=ready.lease)
        assert stub.Release(release).stood
        assert stub.Release(release).stood, "a repeated release says the same"
        nodes.prefill.wait_idle()


def test_skipped_tokens_are_not_leased(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with prefill_stub(nodes.prefill.address) as stub:
        _, whole, ready = run(stub, prefill_request(epoch))
        stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease))
        _, part, ready = run(stub, prefill_request(epoch, skip_tokens=2 * BLOCK))
        assert len(ready.block_ids) == 3
        assert part.choices == whole.choices
        assert stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease)).stood


def test_every_choice_gets_its_first_token(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5, logprobs=2)
    with prefill_stub(nodes.prefill.address) as stub:
        _, first, ready = run(stub, prefill_request(epoch, sampling=sampling))
        assert len(first.choices) == 3
        assert all(len(choice.logprobs.top_ids) == 2 for choice in first.choices)
        assert stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease)).stood


def test_a_lease_expires(nodes: Nodes) -> None:
    epoch = nodes.short.describe().epoch
    before = nodes.counter("leases_expired", nodes.short)
    with prefill_stub(nodes.short.address) as stub:
        _, _, ready = run(stub, prefill_request(epoch))
        nodes.short.wait_idle()
        assert nodes.counter("leases_expired", nodes.short) == before + 1
        assert not stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease)).stood


def test_another_epoch_is_refused_and_releases_nothing(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with prefill_stub(nodes.prefill.address) as stub:
        with pytest.raises(grpc.RpcError) as raised:
            run(stub, prefill_request("0123456789abcdef"))
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert epoch in str(raised.value.details())
        _, _, ready = run(stub, prefill_request(epoch))
        assert not stub.Release(pb.ReleaseRequest(epoch="0123456789abcdef", lease=ready.lease)).stood
        assert stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease)).stood
        assert not stub.Release(pb.ReleaseRequest(epoch=epoch, lease=10**12)).stood


@pytest.mark.parametrize(
    ("prompt", "fields", "word"),
    [
        (b"", {}, "0 tokens"),
        (b"\x01\x02\x03", {}, "3 bytes"),
        ([128], {}, "128"),
        ([1] * 600, {}, "600"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
    ],
)
def test_garbage_is_refused(prompt: list[int] | bytes, fields: dict[str, int], word: str, nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with prefill_stub(nodes.prefill.address) as stub:
        with pytest.raises(grpc.RpcError) as raised:
            run(stub, prefill_request(epoch, prompt, greedy(**{"max_tokens": 4, **fields})))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert word in str(raised.value.details())


def test_a_cancelled_call_leaves_nothing(nodes: Nodes) -> None:
    """Cancelled at all sorts of moments: before the prefill, in it, while the lease is announced, and after."""
    epoch = nodes.prefill.describe().epoch
    with prefill_stub(nodes.prefill.address) as stub:
        for index in range(30):
            prompt = [(index * 31 + position) % 120 + 3 for position in range(200)]
            call: Any = stub.Prefill(prefill_request(epoch, prompt))
            lease = next(iter(call)).accepted.lease
            time.sleep(0.002 * (index % 7))
            call.cancel()
            stub.Release(pb.ReleaseRequest(epoch=epoch, lease=lease))
    nodes.prefill.wait_idle()


def test_too_many_prompts_are_refused_as_overload(nodes: Nodes) -> None:
    """The queue takes 8; a flood of long prompts gets RESOURCE_EXHAUSTED, not silence, and what was taken is served."""
    epoch = nodes.prefill.describe().epoch
    codes: list[grpc.StatusCode] = []

    def call(index: int) -> None:
        prompt = [(index * 17 + position) % 120 + 3 for position in range(400)]
        with prefill_stub(nodes.prefill.address) as stub:
            try:
                _, _, ready = run(stub, prefill_request(epoch, prompt))
                stub.Release(pb.ReleaseRequest(epoch=epoch, lease=ready.lease))
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as exc:
                codes.append(exc.code())

    threads = [threading.Thread(target=call, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes.count(grpc.StatusCode.OK) >= 8


def test_handshake_compares_before_it_tells(nodes: Nodes) -> None:
    with prefill_stub(nodes.prefill.address) as stub:
        good = pb.HandshakeRequest(
            protocol=PROTOCOL_VERSION, compat_hash=nodes.prefill.describe().compat_hash, node_id="d", epoch="e"
        )
        reply = stub.Handshake(good)
        assert reply.epoch == nodes.prefill.describe().epoch
        assert reply.ranks[0].agent.endswith(reply.epoch)
        wrong = pb.HandshakeRequest()
        wrong.CopyFrom(good)
        wrong.compat_hash = "0" * 64
        wrong.compat_fields["block_size"] = "4096"
        with pytest.raises(grpc.RpcError, match="block_size: 8 here, 4096 there") as raised:
            stub.Handshake(wrong)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        wrong.CopyFrom(good)
        wrong.protocol = 99
        with pytest.raises(grpc.RpcError, match="99"):
            stub.Handshake(wrong)


def test_the_choice_of_a_runner_is_described_and_logged_once(nodes: Nodes) -> None:
    with grpc.insecure_channel(nodes.prefill.address) as channel:
        description = pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest())
    assert description.runner in ("V1", "V2")
    assert description.runner_reasons
    line = f"runner {description.runner}: {'; '.join(description.runner_reasons)}"
    assert nodes.prefill.output.count(line) == 1


def test_describe_health_and_reflection(nodes: Nodes) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(nodes.prefill.address) as channel:
        description = pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest())
        assert (description.role, description.state, description.node_id) == ("prefill", "ready", nodes.main)
        assert description.kv_layout.block_size == BLOCK
        for service in ("", "pdserve.v1.PrefillNode", "pdserve.v1.Node"):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"pdserve.v1.PrefillNode", "pdserve.v1.Node", "grpc.health.v1.Health"} <= set(services)
