"""Peers and routers that send wrong numbers to simulated nodes: these serve, and no process of theirs ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from fast_set import share
from fleet import Fleet, NodeProcess
from lies import Lie, lies
from machine import patience
from node_client import RouterClient, greedy
from router_process import wait_for
from scripted_node import ScriptedNode
from stages import PROMPT, Pair, send_prompt, start_pair

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb

SIMULATED = ("--engine", "simulated")
LIARS = 24  # at a time
OUTPUT = 12
LAYOUT = ("ranks", "layout")
#: Each ended the node that read it, or stopped its answers.
FATAL = [
    Lie((*LAYOUT, "num_kv_heads"), 0),
    Lie((*LAYOUT, "num_layers"), 0),
    Lie((*LAYOUT, "block_size"), 2**32 - 1),
]
OF_HANDSHAKES = lies(pb.HandshakeReply.DESCRIPTOR)
OF_DESCRIPTIONS = lies(pb.NodeDescription.DESCRIPTOR)
OF_EVENTS = lies(pb.PrefillEvent.DESCRIPTOR)
CONTENT = ("token_id", "logprob", "top_ids", "top_logprobs")  # a liar may sample any token


class LyingPrefill(ScriptedNode, pb_grpc.PrefillNodeServicer):
    """A prefill node that computes nothing, and tells one lie when it describes itself."""

    def __init__(self, node_id: str, described: pb.NodeDescription, reply: pb.HandshakeReply, lie: Lie) -> None:
        self.lie = lie
        self.asked = 0  # times
        super().__init__("")
        self.description.CopyFrom(described)
        self.reply = reply
        for message in (self.description, self.reply):
            message.node_id = node_id
            message.epoch = "1"
        for rank in self.reply.ranks:
            rank.agent = node_id

    def add_services(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillNodeServicer_to_server(self, server)
        pb_grpc.add_NodeServicer_to_server(self, server)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        return self._altered(self.description)  # type: ignore[no-any-return]

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        return self._altered(self.reply)  # type: ignore[no-any-return]

    async def Serve(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield pb.PrefillEvents()

    def _altered(self, message: Any) -> Any:
        if self.lie.path[0] not in message.DESCRIPTOR.fields_by_name:
            return message
        altered = type(message)()
        altered.CopyFrom(message)
        self.lie.add_to(altered)
        self.asked += 1
        return altered


def handshake(node: NodeProcess) -> pb.HandshakeReply:
    described = node.describe()
    request = pb.HandshakeRequest(protocol=described.protocol, compat_hash=described.compat_hash, node_id="test")
    with node.channel() as channel:
        return pb_grpc.PrefillNodeStub(channel).Handshake(request, timeout=patience(5.0))


def serves_beside(told: Sequence[Lie], role: str) -> None:
    """Start a node that reads from an honest prefill node and from liars; check that it serves after their lies."""
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet())
        honest = fleet.start_prefill(EMBEDDED_MODEL, SIMULATED)
        fleet.wait_ready()
        described = honest.describe()
        liars = []
        for number, lie in enumerate(told):
            liars.append(LyingPrefill(f"liar-{number}", described, handshake(honest), lie))
            stack.callback(liars[-1].close)
        flag = "--prefill" if role == "decode" else "--kv-source"
        sources = [word for address in (honest.address, *(liar.address for liar in liars)) for word in (flag, address)]
        if role == "decode":
            node = fleet.start_decode(EMBEDDED_MODEL, [*SIMULATED, *sources], peers=False)
        else:
            node = fleet.start_prefill(EMBEDDED_MODEL, [*SIMULATED, *sources])
            fleet.start_decode(EMBEDDED_MODEL, [*SIMULATED, "--prefill", node.address], peers=False)
        fleet.wait_ready()
        wait_for(lambda: all(liar.asked for liar in liars), 20.0)
        wait_for(lambda: honest.describe().node_id in node.describe().connected_peers, 20.0)
        (decode,) = fleet.decode
        with RouterClient(decode.address) as client:
            expected = client.generate(PROMPT, greedy(OUTPUT), cache_salt="local").tokens
            peer = node if role == "prefill" else honest
            wait_for(lambda: peer.describe().node_id in decode.describe().connected_peers, 20.0)
            assert client.generate(PROMPT, greedy(OUTPUT), peer.address, cache_salt="handoff").tokens == expected
        fleet.wait_ready()  # no process has ended
        for process in fleet.nodes:
            process.wait_idle()


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_handshake_with_a_wrong_number_ends_no_node(role: str) -> None:
    serves_beside(FATAL, role)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_no_wrong_number_of_a_handshake_ends_a_node(role: str) -> None:
    told = [*OF_HANDSHAKES, *OF_DESCRIPTIONS]
    random.Random(role).shuffle(told)
    for first in range(0, len(told), LIARS):
        serves_beside(told[first : first + LIARS], role)


# ---------------------------------------------------------------- events


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with start_pair(EMBEDDED_MODEL, SIMULATED, num_tokens=OUTPUT) as pair:
        yield pair


def events_with(lie: Lie, told: list[Lie]) -> Any:
    """Return a hook of the proxy: announcements have the lie, and others come once, before the first part."""

    def alter(event: pb.PrefillEvent) -> Iterable[pb.PrefillEvent]:
        if lie.told(event):
            told.append(lie)
        elif event.HasField("kv_ready") and not told:
            told.append(lie)
            added = pb.PrefillEvent()
            lie.add_to(added)
            return (added, event)
        return (event,)

    return alter


def test_no_wrong_number_of_an_event_ends_a_node_or_changes_a_token(pair: Pair) -> None:
    told_of = [lie for lie in OF_EVENTS if lie.path != ("request",)]  # the proxy sets it
    for lie in random.Random(1).sample(told_of, round(len(told_of) * share)):
        told: list[Lie] = []
        pair.wait_connected()
        pair.proxy.alter_event = events_with(lie, told)
        with RouterClient(pair.decode.address) as client:
            while not told:
                tokens = send_prompt(client, pair).wait().tokens
        pair.proxy.reset()
        assert tokens == pair.expected or lie.path[-1] in CONTENT, str(lie)
    pair.check_served()


# ---------------------------------------------------------------- requests


def test_no_wrong_number_of_a_request_ends_a_node(pair: Pair) -> None:
    """The stream may end; the next one is served."""
    sampling = sampling_to_pb(greedy(4))
    generate = pb.Generate(request=1, token_ids=pack_tokens(PROMPT[:20]), sampling=sampling)
    epoch = pair.prefill.describe().epoch
    prefill = pb.PrefillRequest(request=1, token_ids=pack_tokens(PROMPT[:20]), sampling=sampling, epoch=epoch)
    with pair.decode.channel() as to_d, pair.prefill.channel() as to_p:
        for lie in lies(pb.ServeRequest.DESCRIPTOR):
            send(pb_grpc.DecodeNodeStub(to_d).Serve, pb.ServeRequest(generate=generate), lie)
        for lie in lies(pb.HandoffRequest.DESCRIPTOR):
            send(pb_grpc.PrefillNodeStub(to_p).Serve, pb.HandoffRequest(prefill=prefill), lie)
        for lie in lies(pb.HandshakeRequest.DESCRIPTOR):
            request = pb.HandshakeRequest()
            lie.add_to(request)
            with pytest.raises(grpc.RpcError):
                pb_grpc.PrefillNodeStub(to_p).Handshake(request, timeout=patience(5.0))
        for lie in lies(pb.WatchRequest.DESCRIPTOR):
            watch = pb.WatchRequest()
            lie.add_to(watch)
            call: Any = pb_grpc.NodeStub(to_d).Watch(watch)
            assert next(call).sequence == 1
            call.cancel()
    pair.check_served()


def send(serve: Any, honest: Any, lie: Lie) -> None:
    """Send an honest request, then one with the lie, on a stream of their own, and half-close it."""
    message = type(honest)()
    if honest.HasField(lie.path[0]):
        message.CopyFrom(honest)
    lie.add_to(message)
    call = serve(iter([honest, message]), timeout=patience(2.0))
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    ended = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED
    assert call.code() in ended, f"{lie}: {call.details()}"
