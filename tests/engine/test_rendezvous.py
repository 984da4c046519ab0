"""Ranks of other hosts join their leader over real sockets; other connections do not delay them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from engine.executor.build import config_for_hosts
from engine.executor.rank_messages import Hello
from engine.executor.rendezvous import (
    MAX_PENDING,
    JoinedRank,
    Rendezvous,
    connect_leader,
    find_mismatch,
    join,
    listen,
    make_hello,
)
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import detect_devices
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import CapacityError, ConfigError, NodeError, PdserveError
from pdserve.ipc.frames import framed

CPU = detect_devices("cpu", 1)[0]
TIMING = resolve(NodeOptions(model=str(EMBEDDED_MODEL)), CPU, {}).options.peer_timing


def config_of(tp: int = 4, block_size: int = 16, runner: str | None = None) -> NodeConfig:
    options = NodeOptions(model=str(EMBEDDED_MODEL), device="cpu", tp=tp, block_size=block_size)
    return resolve(options, CPU, {} if runner is None else {VARIABLE: runner})


def hello(rank: int, **changes: object) -> Hello:
    config = config_of()
    return msgspec.structs.replace(make_hello(config, rank, config.device, 1), **changes)


class Gathering:
    """A leader with rank 0 that waits for ranks 1 … 3, in a thread."""

    def __init__(self, seconds: float = 30.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.listener = listen(self.address)
        self.joined: dict[int, JoinedRank] = {}
        self.error: PdserveError | None = None
        self._rendezvous = Rendezvous(self.listener, config_of(), range(1, 4))
        self._thread = threading.Thread(target=self._run, args=(seconds,))
        self._thread.start()

    def _run(self, seconds: float) -> None:
        try:
            self.joined = self._rendezvous.gather(seconds)
        except PdserveError as error:
            self.error = error

    def send(self, data: bytes) -> socket.socket:
        sock = connect_leader(self.address, 30.0)
        sock.sendall(data)
        return sock

    def join(self, hello: Hello) -> socket.socket:
        sock = connect_leader(self.address, 30.0)
        try:
            join(sock, hello, TIMING)
        except BaseException:
            sock.close()
            raise
        return sock

    def finish(self) -> list[int]:
        self._thread.join()
        self.listener.close()
        for _, sock in self.joined.values():
            sock.close()
        return sorted(self.joined)


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    gathering = Gathering()
    ranks = [gathering.join(hello(rank)) for rank in (3, 1)]
    yield gathering
    ranks.append(gathering.join(hello(2)))
    assert gathering.finish() == [1, 2, 3]
    for sock in ranks:
        sock.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hello(1), ["rank 1 has joined already"]),
        (hello(0), ["rank 0", "1, 2, 3"]),
        (hello(7), ["rank 7", "1, 2, 3"]),
        (hello(2, version="0.0.1"), ["pdserve: 0.0.1 there"]),
        (hello(2, parallel=config_of(tp=2).parallel), ["tp 2 there", "tp 4 at the leader"]),
        (hello(2, device=DeviceInfo("cuda", 0, "GPU", 1)), ["cuda there", "cpu at the leader"]),
        (make_hello(config_of(block_size=32), 2, CPU, 1), ["block_size: 32 there, 16 at the leader"]),
        (make_hello(config_of(runner="0"), 2, CPU, 1), [VARIABLE, "V1 there", "nothing at the leader"]),
        (hello(2, forced_runner="V2"), [VARIABLE, "V2 there", "nothing at the leader"]),
    ],
)
def test_a_mismatching_rank_is_rejected_with_the_reason(gathering: Gathering, wrong: Hello, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        gathering.join(wrong)
    for word in words:
        assert word in str(refused.value)


def test_a_forced_runner_of_the_leader_holds_for_hosts_without_the_variable() -> None:
    """A host with the variable must force the same runner."""
    leader = config_of(runner="0")
    joining = (hello(1), make_hello(leader, 2, leader.device, 1), hello(3, forced_runner="V2"))
    assert [bool(find_mismatch(hello, leader)) for hello in joining] == [False, False, True]


def test_ranks_use_the_attention_backend_that_all_hosts_can_start_with(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.executor.build")
    leader = msgspec.structs.replace(config_of(), attention_backend="flashinfer")
    alpha = hello(1, triton_problem="")
    beta = msgspec.structs.replace(alpha, host="beta", flashinfer_problem="FlashInfer is not compiled here yet")
    uncompiled = [alpha, beta]
    assert config_for_hosts(leader, [alpha]) == leader
    assert config_for_hosts(leader, uncompiled) == msgspec.structs.replace(leader, attention_backend="triton")
    assert caplog.messages == ["attention_backend=triton: beta: FlashInfer is not compiled here yet"]
    options = msgspec.structs.replace(leader.options, attention_backend="flashinfer")
    named = msgspec.structs.replace(leader, options=options)
    assert config_for_hosts(named, uncompiled) == named


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x05\0\0\0hello", framed(hello(2))[:50] + b"\0" * 4000],
    ids=["http", "too long", "no msgpack", "broken"],
)
def test_a_connection_that_sends_garbage_is_closed(gathering: Gathering, data: bytes) -> None:
    with gathering.send(data) as sock:
        sock.settimeout(5.0)
        assert sock.recv(1) == b""


def test_silent_connections_do_not_keep_ranks_out(gathering: Gathering) -> None:
    silent = [gathering.send(b"") for _ in range(100)]
    silent.append(gathering.send(framed(hello(2))[:20]))
    with closing(gathering.send(b"")):
        pass
    for sock in silent:
        sock.close()


class ListenerWithEndingConnections(socket.socket):
    """A listener whose oldest connection ends when one more than MAX_PENDING arrives, before either is noticed."""

    connections: list[socket.socket]

    def accept(self) -> tuple[socket.socket, object]:
        accepted = super().accept()
        if len(self.connections) == MAX_PENDING:
            self.connections[0].close()
        if len(self.connections) <= MAX_PENDING:
            self.connections.append(connect_leader(f"127.0.0.1:{self.getsockname()[1]}", 30.0))
        return accepted


def test_a_connection_may_end_at_the_moment_another_replaces_it() -> None:
    with ListenerWithEndingConnections(fileno=socket.create_server(("127.0.0.1", 0)).detach()) as listener:
        listener.connections = [connect_leader(f"127.0.0.1:{listener.getsockname()[1]}", 30.0)]
        with pytest.raises(NodeError, match="have not joined"):
            Rendezvous(listener, config_of(), range(1, 4)).gather(0.2)
        assert len(listener.connections) == MAX_PENDING + 1
        for caller in listener.connections:
            caller.close()


def test_a_rank_may_join_again_after_its_connection_ended() -> None:
    gathering = Gathering()
    gathering.join(hello(1)).close()
    ranks = [gathering.join(hello(rank)) for rank in (2, 3)]
    while True:
        try:
            ranks.append(gathering.join(hello(1)))
            break
        except ConfigError:  # the leader has not noticed its end yet
            continue
    assert gathering.finish() == [1, 2, 3]
    for sock in ranks:
        sock.close()


def test_ranks_that_do_not_join_are_named() -> None:
    gathering = Gathering(seconds=0.3)
    with gathering.join(hello(2)):
        gathering.finish()
    assert isinstance(gathering.error, NodeError)
    assert "ranks 1, 3 of this node have not joined within 0.3 s" in str(gathering.error)


def test_a_missing_leader_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(NodeError, match=f"no leader at 127.0.0.1:{port} for 0 s"):
        connect_leader(f"127.0.0.1:{port}", seconds=0.0)


def test_another_server_at_the_leaders_address_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        connect_leader(f"127.0.0.1:{other.getsockname()[1]}", 30.0) as sock,
    ):
        caller, _ = other.accept()
        with caller:
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(NodeError, match="does not answer as a leader"):
            join(sock, hello(1), TIMING)


def test_a_leader_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(CapacityError, match=address):
            listen(address)


def test_leader_waits_until_its_name_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_name = socket.getaddrinfo
    failures = iter(["unknown", "another host"])

    def late(host: str, port: int, **options: Any) -> Any:
        match next(failures, ""):
            case "unknown":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            case "another host":
                return resolve_name("203.0.113.1", port, **options)
        return resolve_name("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with listen(f"node-0.pods:{port}", seconds=30.0) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_name_that_never_resolves_is_an_error() -> None:
    with pytest.raises(CapacityError, match=r"cannot listen on no-such-host\.invalid:9100"):
        listen("no-such-host.invalid:9100")
