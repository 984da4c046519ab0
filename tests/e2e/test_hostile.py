"""Hostile clients and peers against real processes without a device: no process ends, hangs or leaks."""

from __future__ import annotations

import json
import random
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import psutil
import pytest
from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from machine import patience
from slow_clients import send_unread

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens

SIMULATED = ("--engine", "simulated", "--sim-speed", "100")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, model / name)
    cut = ("--client-stall-timeout", "2")
    with start_fleet(model, prefill_flags=SIMULATED, decode_flags=SIMULATED, router_flags=cut) as fleet:
        complete(fleet)  # creates the objects that later requests reuse
        yield fleet


def complete(fleet: Fleet) -> None:
    assert len(fleet.complete(list(range(100, 180)), 5)) == 5


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def num_open(fleet: Fleet) -> dict[int, int]:
    """Return the numbers of open file descriptors of the router and of the nodes' frontends, by pid."""
    assert fleet.router is not None
    return {p.pid: psutil.Process(p.pid).num_fds() for p in (fleet.router, *fleet.prefill, *fleet.decode)}


@pytest.fixture
def unharmed(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet; after each test it must serve, be idle, and have no more open file descriptors than before."""
    before = num_open(fleet)
    yield fleet
    complete(fleet)
    for node in (*fleet.prefill, *fleet.decode):
        node.wait_idle(20.0)
        assert node.describe().state == "ready"
    wait_for(lambda: all(count <= before[pid] for pid, count in num_open(fleet).items()))
    metrics = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
    assert "pdserve_requests_in_flight 0.0" in metrics


# ---------------------------------------------------------------- clients


def body_bytes(**fields: Any) -> bytes:
    body = json.dumps(
        {"model": MODEL_NAME, "prompt": [5] * 40, "max_tokens": 40, "ignore_eos": True, **fields}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def connect(fleet: Fleet) -> socket.socket:
    assert fleet.router is not None
    host, _, port = fleet.router.address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30.0)
    sock.connect((host, int(port)))
    return sock


def test_client_that_never_reads_is_disconnected(unharmed: Fleet) -> None:
    """The client's request is paused, and ends on the nodes when the router closes the connection."""
    decode = unharmed.decode[0]
    before = unharmed.decode[0].counter("sampled_tokens")
    with send_unread(unharmed.url, {"n": 32, "max_tokens": 1900, "logprobs": 20}) as client:
        wait_for(lambda: decode.status().paused == 32)
        assert decode.status().held_blocks
        decode.wait_idle(30.0)
        assert decode.status().paused == 0
        assert decode.counter("sampled_tokens") - before < 32 * 1900 / 10
        with suppress(ConnectionError):
            while client.recv(1 << 20):  # drains what the client's kernel has received
                pass
    metrics = httpx.get(f"{unharmed.url}/metrics", trust_env=False).text
    assert "pdserve_stalled_clients_total 1.0" in metrics


def test_router_survives_streams_cut_at_any_byte(unharmed: Fleet) -> None:
    rng = random.Random(7)
    for _ in range(40):
        with connect(unharmed) as sock:
            sock.sendall(body_bytes(stream=True, n=rng.choice([1, 4])))
            if rng.random() < 0.8:
                sock.recv(rng.randrange(1, 4096))
            if rng.random() < 0.5:  # a reset instead of an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def exchange(sock: socket.socket, data: bytes) -> None:
    """Send all bytes and read until the end. The router may close the connection, but must not hang."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        raise
    except OSError:  # the router has closed the connection
        pass


def mutated(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data = data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
            case 1:
                data = data[:at] + data[at + rng.randrange(1, 30) :]
            case 2:
                data = data[:at] + data[max(0, at - rng.randrange(1, 200)) :]
            case 3:
                data = data[:at] + rng.choice([b"\r\n", b"\0", b"\xff", b'"', b"{", b"[", b"9" * 40]) + data[at + 1 :]
    return data


def test_router_survives_malformed_http(unharmed: Fleet) -> None:
    rng = random.Random(11)
    seeds = [
        body_bytes(),
        body_bytes(stream=True),
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{'a':\r\n2\r\n1}\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    ]
    for _ in range(200):
        with connect(unharmed) as sock:
            exchange(sock, mutated(rng, rng.choice(seeds)))


# ---------------------------------------------------------------- peers

EXTREMES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 16, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2, 16, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 1.0, -1.0, 0.5, float("inf"), float("nan")),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, 1.0, -1.0, float("inf"), float("nan")),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 77),
}
STRINGS = ("", "x", "\0", "ü" * 300, "../../etc/passwd", "{")
TOKENS = (b"", b"\1", pack_tokens([1] * 40), pack_tokens([2**32 - 1]), pack_tokens(range(200)), b"\xff" * 4001)


class Fuzzer:
    """Makes well-formed messages with random fields; about half of the requests get valid sampling and token ids."""

    def __init__(self, seed: int, epoch: str) -> None:
        self._rng = random.Random(seed)
        self._epoch = epoch

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        message = kind()
        for field in message.DESCRIPTOR.fields:
            if depth and self._rng.random() < 0.3:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.containing_oneof is not None and self._rng.random() < 0.5:
                continue
            self._fill(message, field, depth)
        return self._make_valid(message) if self._rng.random() < 0.5 else message

    def _fill(self, message: Message, field: Any, depth: int) -> None:
        rng = self._rng
        if field.is_repeated:
            values = [self._value(field, depth) for _ in range(rng.randrange(4))] if depth < 3 else []
            if field.message_type is not None:
                for value in values:
                    getattr(message, field.name).add().CopyFrom(value)
            else:
                getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(message, field.name, self._value(field, depth))

    def _value(self, field: Any, depth: int) -> Any:
        if field.message_type is not None:
            return self.message(GetMessageClass(field.message_type), depth + 1)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self._rng.choice(TOKENS)
            return self._epoch if field.name == "epoch" else self._rng.choice(STRINGS)
        return self._rng.choice(EXTREMES[field.cpp_type])

    def _make_valid(self, message: Message) -> Message:
        """Give a request valid sampling and tokens, so that it passes the first checks."""
        if isinstance(message, pb.Generate | pb.PrefillRequest):
            served = pb.SamplingParams(
                max_tokens=20, n=2, top_p=1.0, repetition_penalty=1.0, logprobs=-1, prompt_logprobs=-1
            )
            message.sampling.CopyFrom(served)
            message.token_ids = TOKENS[2]
            message.timeout_ms = 2000
            message.request = self._rng.randrange(2**32)
        return message


def methods() -> list[MethodDescriptor]:
    return [method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods]


def call(node: NodeProcess, method: MethodDescriptor, requests: list[bytes]) -> list[bytes]:
    """Call a method of a node and return its answers until the call ends or one second has passed."""
    answers: list[bytes] = []
    details = ""
    path = f"/{method.containing_service.full_name}/{method.name}"
    channel: Any
    with grpc.insecure_channel(node.address) as channel:
        try:
            for answer in channel.stream_stream(path)(iter(requests), timeout=1.0):
                answers.append(answer)
        except grpc.RpcError as exc:
            details = exc.details() or ""
    assert not details.startswith("Unexpected") or "DecodeError" in details, f"unexpected exception: {details}"
    return answers


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_nodes_survive_messages_with_random_fields(unharmed: Fleet, seed: int) -> None:
    for node in (*unharmed.prefill, *unharmed.decode):
        fuzzer = Fuzzer(seed, node.describe().epoch)
        for method in methods():
            kind = GetMessageClass(method.input_type)
            num_messages = 30 if method.client_streaming else 1
            call(node, method, [fuzzer.message(kind).SerializeToString() for _ in range(num_messages)])


def test_nodes_survive_truncated_and_changed_messages(unharmed: Fleet) -> None:
    rng = random.Random(3)
    sampling = pb.SamplingParams(max_tokens=20, n=1, top_p=1.0, repetition_penalty=1.0, logprobs=-1, prompt_logprobs=-1)
    epoch = unharmed.prefill[0].describe().epoch
    generate = pb.ServeRequest(generate=pb.Generate(request=1, token_ids=TOKENS[2], sampling=sampling))
    handoff = pb.HandoffRequest(
        prefill=pb.PrefillRequest(request=1, epoch=epoch, token_ids=TOKENS[2], sampling=sampling)
    )
    decode, prefill = (pb.DESCRIPTOR.services_by_name[f"{role}Node"] for role in ("Decode", "Prefill"))
    for _ in range(40):
        call(unharmed.decode[0], decode.methods_by_name["Serve"], [mutated(rng, generate.SerializeToString())])
        call(unharmed.prefill[0], prefill.methods_by_name["Serve"], [mutated(rng, handoff.SerializeToString())])
