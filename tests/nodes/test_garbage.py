"""Bytes that are no gRPC, messages that are no messages, and peers that say what is not so."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fault_proxy import UNSET
from machine import patience
from node_client import RouterClient, greedy
from stages import PROMPT, RELEASE_SECONDS, Pair, held_at, send_prompt

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1])
NUM_TOKENS = 12
NO_MESSAGE = b"\x0a\xff\xff\xff\xff\x0f"  # a field that is longer than the message


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Whatever was said in a test, the next request after it is served as ever."""
    pair = replace(shared_pair, num_tokens=NUM_TOKENS, expected=shared_pair.expected[:NUM_TOKENS])
    yield pair
    pair.proxy.reset()
    pair.proxy.target = pair.prefill.address
    pair.check_served()


# ---------------------------------------------------------------- strangers


def test_bytes_that_are_no_grpc(pair: Pair) -> None:
    noise = random.Random(1).randbytes(4096)
    sent = [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS says hello
        noise,
        PREFACE[:11],
        PREFACE + SETTINGS[:7],
        PREFACE + SETTINGS + noise,
        PREFACE + b"\xff\xff\xff" + noise,
    ]
    with ExitStack() as connections:  # left open: waiting for their next byte must not delay others
        for node in (pair.prefill, pair.decode):
            host, _, port = node.address.rpartition(":")
            for data in sent:
                connection = connections.enter_context(
                    socket.create_connection((host, int(port)), timeout=patience(5.0))
                )
                connection.sendall(data)
        pair.check_served()


@pytest.mark.parametrize(
    "method",
    ["PrefillNode/Serve", "PrefillNode/Handshake", "DecodeNode/Serve", "Node/None"],
)
def test_messages_that_are_none(method: str, pair: Pair) -> None:
    node = pair.decode if method.startswith("DecodeNode") else pair.prefill
    channel: Any
    with grpc.insecure_channel(node.address) as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(f"/pdserve.v1.{method}")(iter([NO_MESSAGE]), timeout=patience(5.0)))
    assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


# ---------------------------------------------------------------- handshakes


def _no_ranks(reply: pb.HandshakeReply) -> None:
    del reply.ranks[:]


def _two_ranks(reply: pb.HandshakeReply) -> None:
    reply.ranks.add().CopyFrom(reply.ranks[0])


def _half_of_the_layers(reply: pb.HandshakeReply) -> None:
    layout = reply.ranks[0].layout
    held = layout.num_layers // 2
    of_the_model = layout.num_layers
    layout.num_layers = held
    share = pb.KVShare(num_layers=held, num_heads=layout.num_kv_heads)
    share.total_layers = of_the_model
    share.total_heads = layout.num_kv_heads
    reply.ranks[0].share.CopyFrom(share)


def _half_the_metadata(reply: pb.HandshakeReply) -> None:
    metadata = reply.ranks[0].metadata
    reply.ranks[0].metadata = metadata[: len(metadata) // 2]


def _no_metadata(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].metadata = b""


def _noise(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].metadata = random.Random(2).randbytes(len(reply.ranks[0].metadata))


def _metadata_of_another_agent(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].agent = "another"


def _no_layout(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].ClearField("layout")


def _memory_that_is_not_there(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].num_bytes *= 1000
    reply.ranks[0].layout.num_blocks *= 1000


def _memory_elsewhere(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].address = 4096


def _no_heads(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].layout.num_kv_heads = 0


def _no_layers(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].layout.num_layers = 0


def _a_block_size_of_32_bits(reply: pb.HandshakeReply) -> None:
    reply.ranks[0].layout.block_size = 2**32 - 1


def _another_epoch(reply: pb.HandshakeReply) -> None:
    reply.epoch = "0123456789abcdef"


def _nothing(reply: pb.HandshakeReply) -> None:
    reply.Clear()


HANDSHAKES = [
    *(
        _no_ranks,
        _two_ranks,
        _half_of_the_layers,
        _half_the_metadata,
        _no_metadata,
        _noise,
        _metadata_of_another_agent,
        _no_layout,
    ),
    *(_memory_that_is_not_there, _memory_elsewhere, _another_epoch, _nothing),
    *(_no_heads, _no_layers, _a_block_size_of_32_bits),
]
EVERYDAY = (_half_the_metadata, _memory_that_is_not_there, _no_heads)


@pytest.mark.parametrize(
    "alter",
    [pytest.param(alter, marks=[] if alter in EVERYDAY else pytest.mark.slow) for alter in HANDSHAKES],
    ids=lambda alter: alter.__name__.strip("_"),
)
def test_a_handshake_that_lies(alter: Callable[[pb.HandshakeReply], None], pair: Pair) -> None:
    """D cannot read from such a peer, says so, tries again, and serves meanwhile."""
    heard: list[None] = []

    def altered(reply: pb.HandshakeReply) -> pb.HandshakeReply:
        heard.append(None)
        alter(reply)
        return reply

    pair.proxy.target = UNSET  # so that D shakes hands anew
    pair.decodes.wait_until(lambda: not pair.decode.describe().connected_peers, 10.0)
    pair.proxy.alter_handshake = altered
    pair.proxy.target = pair.prefill.address
    pair.decodes.wait_until(lambda: len(heard) > 1, 20.0)
    assert_served(pair)


def assert_served(pair: Pair) -> None:
    """The tokens are exact on either path, and no node keeps a block."""
    with RouterClient(pair.decode.address) as client:
        assert send_prompt(client, pair).wait().tokens == pair.expected
    for node in (pair.prefill, pair.decode):
        node.wait_idle(RELEASE_SECONDS)


# ---------------------------------------------------------------- announcements and releases


Altered = Iterable[pb.PrefillEvent]


def _twice(kind: str) -> Callable[[pb.PrefillEvent], Altered]:
    return lambda event: (event, event) if event.HasField(kind) else (event,)  # type: ignore[arg-type]


def _never(kind: str) -> Callable[[pb.PrefillEvent], Altered]:
    return lambda event: () if event.HasField(kind) else (event,)  # type: ignore[arg-type]


def _kv_ready(**fields: object) -> Callable[[pb.PrefillEvent], Altered]:
    def alter(event: pb.PrefillEvent) -> Altered:
        if event.HasField("kv_ready"):
            event.kv_ready.MergeFrom(pb.KVReady(**fields))  # type: ignore[arg-type]
        return (event,)

    return alter


def _first_token(token_id: int) -> Callable[[pb.PrefillEvent], Altered]:
    def alter(event: pb.PrefillEvent) -> Altered:
        for choice in event.first_tokens.choices if event.HasField("first_tokens") else ():
            choice.token_id = token_id
        return (event,)

    return alter


def _next_tokens(token_id: int, before: int = 0, behind: int = 0) -> Callable[[pb.PrefillEvent], Altered]:
    """Add ``before`` and ``behind`` events with next tokens around the first tokens."""
    more = pb.PrefillEvent(next_token=pb.SampledToken(token_id=token_id))

    def alter(event: pb.PrefillEvent) -> Altered:
        return (*[more] * before, event, *[more] * behind) if event.HasField("first_tokens") else (event,)

    return alter


def _late() -> Callable[[pb.PrefillEvent], Altered]:
    """Every announcement comes after the one that follows it."""
    kept: list[pb.PrefillEvent] = []

    def alter(event: pb.PrefillEvent) -> Altered:
        if event.HasField("kv_ready") and not kept:
            kept.append(event)
            return ()
        return (event, *(kept.pop() for _ in range(len(kept))))

    return alter


def _drains_behind_first_tokens() -> Callable[[pb.PrefillEvent], Altered]:
    """Once, and without a part."""
    drained = pb.PrefillEvent(failed=pb.Failure(code=pb.Failure.DRAINING))
    heard: list[None] = []

    def alter(event: pb.PrefillEvent) -> Altered:
        if heard or event.HasField("accepted"):
            return (event,)
        if event.HasField("kv_ready"):
            return ()
        heard.append(None)
        return (event, drained)

    return alter


EVENTS = {
    "accepted twice": _twice("accepted"),
    "a part twice": _twice("kv_ready"),
    "first tokens twice": _twice("first_tokens"),
    "never accepted": _never("accepted"),
    "no part": _never("kv_ready"),
    "no first tokens": _never("first_tokens"),
    "parts out of order": _late(),
    "blocks that P has not": _kv_ready(block_ids=[1 << 31]),
    "another number of tokens": _kv_ready(num_tokens=8),
    "more than the prompt": _kv_ready(num_tokens=4096),
    "no time": _kv_ready(lease_ms=1),
    "a token that is none": _first_token(1 << 20),
    "a next token before the first": _next_tokens(5, before=1),
    "a next token that is none": _next_tokens(1 << 20, behind=1),
    "drains behind first tokens": _drains_behind_first_tokens(),
    "an event of no kind": lambda event: (pb.PrefillEvent(), event),
}


@pytest.mark.parametrize("what", EVENTS)
def test_announcements_that_lie(what: str, pair: Pair) -> None:
    pair.proxy.alter_event = EVENTS[what]
    assert_served(pair)


@pytest.mark.parametrize(
    "lie",
    [
        pb.TokenLogprobs(logprob=-1.0, top_ids=[5]),
        pb.TokenLogprobs(logprob=-1.0, top_ids=[5, 6], top_logprobs=[-1.0, -1.0]),
        pb.TokenLogprobs(logprob=-1.0, top_ids=[1 << 20], top_logprobs=[-1.0]),
        pb.TokenLogprobs(logprob=float("nan"), top_ids=[5], top_logprobs=[-1.0]),
    ],
    ids=["unlike lengths", "more than asked for", "a token that is none", "nan"],
)
def test_logprobs_that_lie_are_not_passed_on(lie: pb.TokenLogprobs, pair: Pair) -> None:
    def alter(event: pb.PrefillEvent) -> Altered:
        for choice in event.first_tokens.choices if event.HasField("first_tokens") else ():
            choice.logprobs.CopyFrom(lie)
        return (event,)

    pair.proxy.alter_event = alter
    failures = pair.decode.counter("handoff_failures")
    with RouterClient(pair.decode.address) as client:
        sampling = greedy(pair.num_tokens, logprobs=1)
        salt = pair.new_salt(client)
        answer = client.generate(PROMPT, sampling, pair.prefill.address, cache_salt=salt)
    assert answer.tokens == pair.expected
    assert [len(logprobs.top_ids) for logprobs in answer.logprobs[0]] == [1] * pair.num_tokens
    assert lie not in answer.logprobs[0]
    assert pair.decode.counter("handoff_failures") == failures + 1


def test_next_tokens_that_were_not_asked_for(pair: Pair) -> None:
    """For a resumed request P samples one token, which D ignores."""
    done = pair.expected[:5]
    failures = pair.decode.counter("handoff_failures")
    pair.proxy.alter_event = _next_tokens(5, behind=1)
    resume = [pb.ResumedChoice(choice=0, token_ids=pack_tokens(done))]
    with RouterClient(pair.decode.address) as client:
        answer = client.generate(PROMPT, greedy(pair.num_tokens), pair.prefill.address, resume=resume)
    assert answer.tokens == pair.expected[5:]
    assert pair.decode.counter("handoff_failures") == failures + 1


@pytest.mark.parametrize("kind", ["prefill", "release"])
def test_requests_that_come_twice(kind: str, pair: Pair) -> None:
    heard: list[str] = []

    def alter(request: pb.HandoffRequest) -> Iterable[pb.HandoffRequest]:
        heard.append(request.WhichOneof("kind") or "")
        return (request, request) if heard[-1] == kind else (request,)

    pair.proxy.alter_request = alter
    assert_served(pair)
    assert kind in heard


def test_a_release_before_the_first_part_that_comes_twice(pair: Pair) -> None:
    """The client leaves before D has an answer of P."""
    heard: list[str] = []

    def alter(request: pb.HandoffRequest) -> Iterable[pb.HandoffRequest]:
        heard.append(request.WhichOneof("kind") or "")
        return (request, request)

    with held_at("accepted", pair) as held:
        pair.proxy.alter_request = alter
        held.client.cancel(held.result)
        pair.decodes.wait_until(lambda: heard == ["release"], 10.0)
        pair.prefill.wait_idle(RELEASE_SECONDS)
    pair.decode.wait_idle(RELEASE_SECONDS)
    assert heard == ["release"]


def test_an_extension_that_comes_twice(pair: Pair) -> None:
    """The answer comes twice, too; the lease is released as ever."""
    extended = threading.Event()

    def alter(request: pb.HandoffRequest) -> Iterable[pb.HandoffRequest]:
        if not request.HasField("extend"):
            return (request,)
        extended.set()
        return (request, request)

    def wait_for_extension(kind: str) -> None:
        if kind == "first_tokens":
            assert extended.wait(patience(20.0))

    failures = pair.decode.counter("handoff_failures")
    pair.proxy.alter_request = alter
    pair.proxy.before_event = wait_for_extension
    assert_served(pair)
    assert extended.is_set()
    assert pair.decode.counter("handoff_failures") == failures
