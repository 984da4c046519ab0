"""A real prefill node over gRPC: leases begin, end and are not confused."""

from __future__ import annotations

import time

import grpc
import pytest
from node_client import Prefill, PrefillClient, PrefillFailed, greedy
from node_fleet import Nodes

from pdserve.config.compatibility import PROTOCOL_VERSION
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams

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


def run(client: PrefillClient, request: pb.PrefillRequest) -> tuple[Prefill, pb.FirstTokens, pb.KVReady]:
    prefill = client.send(request)
    events = {event.WhichOneof("kind"): event for event in prefill.all()}
    return prefill, events["first_tokens"].first_tokens, events["kv_ready"].kv_ready


def test_a_prompt_is_leased_until_its_release(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        prefill, first, ready = run(client, prefill_request(epoch))
        assert len(first.choices) == 1
        assert ready.num_tokens == len(PROMPT)
        assert len(ready.block_ids) == len(set(ready.block_ids)) == len(PROMPT) // BLOCK
        assert nodes.prefill.status().leased_blocks == len(ready.block_ids)
        assert client.release(prefill)
        assert not client.release(prefill), "a lease stands once"
        nodes.prefill.wait_idle()


def test_skipped_tokens_are_not_leased(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        prefill, whole, ready = run(client, prefill_request(epoch))
        client.release(prefill)
        prefill, part, ready = run(client, prefill_request(epoch, skip_tokens=2 * BLOCK))
        assert len(ready.block_ids) == 3
        assert part.choices == whole.choices
        assert client.release(prefill)


def test_every_choice_gets_its_first_token(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5, logprobs=2)
    with PrefillClient(nodes.prefill.address) as client:
        prefill, first, _ = run(client, prefill_request(epoch, sampling=sampling))
        assert len(first.choices) == 3
        assert all(len(choice.logprobs.top_ids) == 2 for choice in first.choices)
        assert client.release(prefill)


def test_a_lease_without_extension_expires(nodes: Nodes) -> None:
    epoch = nodes.short.describe().epoch
    before = nodes.counter("leases_expired", nodes.short)
    with PrefillClient(nodes.short.address) as client:
        prefill, _, _ = run(client, prefill_request(epoch))
        nodes.short.wait_idle()
        assert nodes.counter("leases_expired", nodes.short) == before + 1
        assert not client.extend(prefill)
        assert not client.release(prefill)


def test_a_prompt_for_another_epoch_is_refused(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        with pytest.raises(PrefillFailed, match=epoch) as raised:
            run(client, prefill_request("0123456789abcdef"))
        assert raised.value.code == pb.Failure.NODE_FAILED


@pytest.mark.parametrize(
    ("prompt", "fields", "word"),
    [
        (b"", {}, "0 tokens"),
        (b"\x01\x02\x03", {}, "3 bytes"),
        ([128], {}, "128"),
        ([1] * 600, {}, "600"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_invalid_prompts_are_refused(
    prompt: list[int] | bytes, fields: dict[str, int], word: str, nodes: Nodes
) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        with pytest.raises(PrefillFailed, match=word) as raised:
            run(client, prefill_request(epoch, prompt, greedy(**{"max_tokens": 4, **fields})))
        assert raised.value.code == pb.Failure.INVALID


def test_a_prompt_released_at_any_time_frees_every_block(nodes: Nodes) -> None:
    """Release comes before the prefill, during it, during announcements, and afterwards."""
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        for index in range(30):
            prompt = [(index * 31 + position) % 120 + 3 for position in range(200)]
            prefill = client.send(prefill_request(epoch, prompt))
            time.sleep(0.002 * (index % 7))
            client.release(prefill)
        nodes.prefill.wait_idle()


def test_a_prompt_ends_at_its_deadline(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        nodes.prefill.stop("engine")
        try:
            request = prefill_request(epoch)
            request.timeout_ms = 100
            prefill = client.send(request)
            assert prefill.next().HasField("accepted")
            with pytest.raises(PrefillFailed, match="within the 0") as raised:
                prefill.next()
            assert raised.value.code == pb.Failure.DEADLINE
        finally:
            nodes.prefill.resume("engine")
        nodes.prefill.wait_idle()


def test_a_repeated_prompt_number_ends_the_stream(nodes: Nodes) -> None:
    epoch = nodes.prefill.describe().epoch
    with PrefillClient(nodes.prefill.address) as client:
        nodes.prefill.stop("engine")
        try:
            prefill = client.send(prefill_request(epoch))
            client.send(prefill_request(epoch), prefill.number)
            with pytest.raises(grpc.RpcError, match="prompt 1 is computed for this stream already") as raised:
                prefill.all()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            nodes.prefill.resume("engine")
    nodes.prefill.wait_idle()


def test_prompts_beyond_the_queue_limit_are_overloaded(nodes: Nodes) -> None:
    """The queue takes 8 prompts. Further ones fail as overloaded, and accepted ones are computed."""
    epoch = nodes.prefill.describe().epoch
    served = 0
    codes = set()
    with PrefillClient(nodes.prefill.address) as client:
        prefills = [
            client.send(prefill_request(epoch, [(index * 17 + position) % 120 + 3 for position in range(400)]))
            for index in range(40)
        ]
        for prefill in prefills:
            try:
                prefill.all()
                client.release(prefill)
                served += 1
            except PrefillFailed as exc:
                codes.add(exc.code)
    assert codes <= {pb.Failure.OVERLOADED}
    assert served >= 8


def test_an_incompatible_handshake_gets_no_memory_regions(nodes: Nodes) -> None:
    with grpc.insecure_channel(nodes.prefill.address) as channel:
        stub = pb_grpc.PrefillNodeStub(channel)
        good = pb.HandshakeRequest(
            protocol=PROTOCOL_VERSION, compat_hash=nodes.prefill.describe().compat_hash, node_id="d", epoch="e"
        )
        reply = stub.Handshake(good)
        assert reply.epoch == nodes.prefill.describe().epoch
        assert reply.epoch in reply.ranks[0].agent
        wrong = pb.HandshakeRequest()
        wrong.CopyFrom(good)
        wrong.compat_hash = "0" * 64
        wrong.compat_fields["block_size"] = "4096"
        with pytest.raises(grpc.RpcError, match="block_size: 8 here, 4096 there") as raised:
            stub.Handshake(wrong)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        for protocol in (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
            wrong.CopyFrom(good)
            wrong.protocol = protocol
            with pytest.raises(grpc.RpcError, match=f"protocol {protocol} is not {PROTOCOL_VERSION}") as raised:
                stub.Handshake(wrong)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_the_runner_is_described_and_its_choice_logged_once(nodes: Nodes) -> None:
    with grpc.insecure_channel(nodes.prefill.address) as channel:
        description = pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest())
    assert description.runner in ("V1", "V2")
    assert description.runner_reasons
    line = f"runner {description.runner}: {'; '.join(description.runner_reasons)}"
    assert nodes.prefill.output.count(line) == 1


def test_describe_health_and_reflection_are_served(nodes: Nodes) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(nodes.prefill.address) as channel:
        description = pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest())
        assert (description.role, description.state, description.node_id) == ("prefill", "ready", nodes.main)
        assert description.kv_layout.block_size == BLOCK
        for service in ("", "live", "loaded", "pdserve.v1.PrefillNode", "pdserve.v1.Node"):
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"pdserve.v1.PrefillNode", "pdserve.v1.Node", "grpc.health.v1.Health"} <= set(services)
