"""Faults of reads over NIXL. Main invariant: after a read has been reported, none of its bytes lands."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
from kv_nodes import Reader, Source
from machine import patience

from connector.backends.nixl import ucx
from connector.backends.nixl.nixl_connector import NixlConnector
from connector.backends.nixl.ucx_sockets import PeerSockets
from connector.setup import ConnectorSetup
from pdserve.kv.layout import FullAttentionSpec, KVLayout
from pdserve.protocols import KVConnector
from pdserve.records import KVRead, Peer
from pdserve.rpc.timeouts import PeerTiming

# Blocks of 128 KiB. Over TCP, all of them take a fifth of a second.
BIG = KVLayout(
    num_blocks=1024, block_size=16, kernel_block_size=16, num_layers=8, spec=FullAttentionSpec(4, 64, "bfloat16")
)
SMALL = msgspec.structs.replace(BIG, num_blocks=16)
ALL = list(range(BIG.num_blocks))

MakeSource = Callable[[KVLayout], Source]
MakeReader = Callable[[KVConnector, KVLayout], Reader]


@pytest.fixture
def make_source() -> Iterator[MakeSource]:
    sources: list[Source] = []

    def make(layout: KVLayout) -> Source:
        sources.append(Source(f"source-{os.urandom(4).hex()}", layout))
        return sources[-1]

    yield make
    for source in sources:
        source.kill()


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    readers: list[Reader] = []

    def make(connector: KVConnector, layout: KVLayout) -> Reader:
        readers.append(Reader(connector, layout))
        return readers[-1]

    yield make
    for reader in readers:
        reader.connector.close()


def _listener_in(metadata: bytes) -> socket.socket:
    """Listen on a loopback port whose bytes occur in the metadata by chance."""
    ports = [port for first in range(len(metadata)) if (port := int.from_bytes(metadata[first : first + 2])) > 1024]
    for port in ports:
        with suppress(OSError):  # in use, maybe by UCX
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port of the metadata is free")


def connector(peer_timeout: float = 1.5) -> NixlConnector:
    return NixlConnector(ConnectorSetup(f"reader-{os.urandom(4).hex()}", PeerTiming(peer_timeout)))


@pytest.mark.usefixtures("tcp")
def test_a_source_killed_during_a_read_fails_it(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(BIG)
    reader = make_reader(connector(), BIG)
    assert reader.connect(source.peer) == ""
    read_id = reader.order(source.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    source.kill()
    assert "connection broke" in reader.result(read_id, timeout=patience(10)).error
    reader.assert_nothing_lands()


def test_a_source_killed_before_a_read_fails_it(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    assert reader.connect(source.peer) == ""
    source.kill()
    reader.connector.read(read := KVRead(99, source.epoch, (1, 2), (1, 2)))
    output = reader.wait(lambda output: bool(output.finished_recving))[-1]
    assert output.finished_recving[0].error
    assert output.finished_recving[0].read_id == read.read_id
    assert output.failed_peers[0][0] == source.epoch, "a broken connection is reported, so that the node connects again"


@pytest.mark.usefixtures("tcp")
def test_a_hung_source_fails_the_read(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(BIG)
    reader = make_reader(connector(), BIG)
    assert reader.connect(source.peer) == ""
    read_id = reader.order(source.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    source.send(signal.SIGSTOP)
    assert "hangs" in reader.result(read_id, timeout=patience(10)).error
    source.send(signal.SIGCONT)
    reader.assert_nothing_lands()
    assert reader.connect(source.peer) == "", "the source continues in the same epoch, though its answers are discarded"
    assert reader.read(source.epoch, [3], [5]).error == ""
    assert reader.touched() == {3}


@pytest.mark.usefixtures("tcp")
def test_dropping_a_peer_leaves_connections_of_others_open(make_source: MakeSource, make_reader: MakeReader) -> None:
    """Even connections to a port whose two bytes occur in the peer's metadata; their bytes do not hide its hang."""
    source = make_source(BIG)
    reader = make_reader(connector(), BIG)
    listener = _listener_in(source.peer.ranks[0].metadata)
    ours = [socket.create_connection(listener.getsockname())]
    assert reader.connect(source.peer) == ""
    ours.append(socket.create_connection(listener.getsockname()))
    theirs = [listener.accept()[0] for _ in ours]
    read_id = reader.order(source.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    source.send(signal.SIGSTOP)
    ended = threading.Event()

    def chatter() -> None:
        while not ended.wait(0.05):
            theirs[0].send(b"x")

    with ThreadPoolExecutor() as threads:
        sending = threads.submit(chatter)
        assert "hangs" in reader.result(read_id, timeout=10).error
        ended.set()
        sending.result()
    for one, other in zip(ours, theirs, strict=True):
        one.settimeout(1.0)
        other.sendall(b"end")
        received = b""
        while not received.endswith(b"end"):
            received += one.recv(1 << 16)
        with pytest.raises(TimeoutError):  # a connection that was shut is at its end
            one.recv(1)
    for endpoint in (listener, *ours, *theirs):
        endpoint.close()


def test_loopback_of_another_host_is_not_ours(make_reader: MakeReader) -> None:
    """A peer on another host may have the port that a local service has here."""
    own = make_reader(connector(), SMALL).rank.metadata
    (interface,) = re.finditer(rb"\x01\x02(.{12}).{18}[\x02\x82]..", own, re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as service:
        here = interface[0][:-2] + service.getsockname()[1].to_bytes(2)
        elsewhere = here.replace(interface[1], bytes(12))
        sockets = [PeerSockets(own, peer) for peer in (elsewhere, here)]
        with socket.create_connection(service.getsockname()):
            assert [end.shut() for end in sockets] == [0, 1]


@pytest.mark.usefixtures("tcp")
def test_disconnecting_ends_reads_from_a_hung_source(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(BIG)
    reader = make_reader(connector(peer_timeout=100), BIG)
    assert reader.connect(source.peer) == ""
    source.send(signal.SIGSTOP)
    read_id = reader.order(source.epoch, ALL, ALL)
    reader.connector.disconnect(source.epoch)
    assert "given up" in reader.result(read_id, timeout=patience(10)).error
    source.send(signal.SIGCONT)
    reader.assert_nothing_lands()


@pytest.mark.usefixtures("tcp")
def test_a_hung_source_does_not_delay_reads_from_others(make_source: MakeSource, make_reader: MakeReader) -> None:
    hung = make_source(SMALL)
    healthy = make_source(SMALL)
    reader = make_reader(connector(peer_timeout=100), SMALL)
    assert reader.connect(hung.peer) == ""
    assert reader.connect(healthy.peer) == ""
    hung.send(signal.SIGSTOP)
    reader.order(hung.epoch, [1], [1])
    assert reader.read(healthy.epoch, [2], [2]).error == ""
    assert reader.touched() == {2}


@pytest.mark.usefixtures("tcp")
def test_close_ends_reads_from_a_hung_source(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(peer_timeout=100), SMALL)
    assert reader.connect(source.peer) == ""
    source.send(signal.SIGSTOP)
    reader.order(source.epoch, [1], [1])
    reader.connector.close()
    source.send(signal.SIGCONT)
    reader.assert_nothing_lands()
    reader.connector.close()


def test_a_broken_connection_can_be_made_again(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    sockets = PeerSockets(reader.rank.metadata, source.peer.ranks[0].metadata)
    assert reader.connect(source.peer) == ""
    assert reader.read(source.epoch, [1], [1]).error == ""
    assert sockets.shut() >= 1
    reader.order(source.epoch, [2], [2])  # the connection may still be intact
    while not reader.read(source.epoch, [2], [2]).error:
        pass
    assert reader.connect(source.peer) == ""
    assert reader.read(source.epoch, [3], [3]).error == ""


def test_a_restarted_node_is_another_epoch(make_source: MakeSource, make_reader: MakeReader) -> None:
    first = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    assert reader.connect(first.peer) == ""
    assert reader.read(first.epoch, [1], [1]).error == ""
    first.kill()
    assert reader.connect(Peer("source", "stale", first.peer.ranks)) != "", "the process has ended"
    second = make_source(SMALL)
    assert reader.connect(second.peer) == ""
    assert reader.read(first.epoch, [2], [2]).error != ""
    assert reader.read(second.epoch, [3], [3]).error == ""
    assert reader.touched() == {1, 3}


def test_dead_peers_leave_no_files_or_threads(make_source: MakeSource, make_reader: MakeReader) -> None:
    """Also after many restarts of a peer."""
    reader = make_reader(connector(), SMALL)

    def count_held() -> list[int]:
        return [len(os.listdir(f"/proc/self/{things}")) for things in ("fd", "task")]

    def run_and_kill() -> None:
        source = make_source(SMALL)
        assert reader.connect(source.peer) == ""
        assert reader.read(source.epoch, [1], [1]).error == ""
        source.kill()
        reader.connector.disconnect(source.epoch)

    run_and_kill()
    time.sleep(2.0)  # some are closed later
    before = count_held()
    for _ in range(3):
        run_and_kill()
    deadline = time.monotonic() + patience(10)
    while any(now > then for now, then in zip(count_held(), before, strict=True)):
        assert time.monotonic() < deadline, f"files and threads: {before} before, {count_held()} now"
        time.sleep(0.05)


def test_metadata_of_another_agent_is_refused(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    rank = msgspec.structs.replace(source.peer.ranks[0], agent="other-e1")
    assert "other-e1" in reader.connect(Peer("other", "e1", (rank,)))
    assert reader.connect(source.peer) == ""


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"nixlSerDes|", b"\xff" * 500])
def test_invalid_metadata_is_refused(make_reader: MakeReader, make_source: MakeSource, metadata: bytes) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    rank = msgspec.structs.replace(source.peer.ranks[0], metadata=metadata)
    assert "connecting failed" in reader.connect(Peer("source", "e1", (rank,)))
    assert reader.connect(source.peer) == ""


def test_unregistered_memory_is_refused(make_source: MakeSource, make_reader: MakeReader) -> None:
    source = make_source(SMALL)
    reader = make_reader(connector(), SMALL)
    rank = source.peer.ranks[0]
    region = msgspec.structs.replace(rank.region, num_bytes=rank.region.num_bytes * 64)
    layout = msgspec.structs.replace(rank.layout, num_blocks=rank.layout.num_blocks * 64)
    claims = msgspec.structs.replace(rank, region=region, layout=layout)
    assert "preparing block descriptors failed" in reader.connect(Peer("source", "e1", (claims,)))
    assert reader.connect(source.peer) == ""
    assert reader.read(source.epoch, [1], [1]).error == ""


def test_environment_is_restored_after_ucx_has_started(
    make_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TCP_KEEPCNT", "7")
    before = dict(os.environ)
    make_reader(connector(), SMALL)
    assert dict(os.environ) == before


def test_ucx_accepts_all_settings(make_reader: MakeReader, caplog: pytest.LogCaptureFixture) -> None:
    make_reader(connector(), SMALL)
    ucx.log().forward()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_importing_the_connector_imports_no_nixl() -> None:
    program = "import sys, connector; print([m for m in ('nixl_cu12', 'nixl_cu13', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=patience(60)
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("tcp")
def test_a_slow_source_is_not_a_stall(make_source: MakeSource, make_reader: MakeReader) -> None:
    """Bytes keep arriving, though no chunk completes within the stall timeout."""
    source = make_source(BIG)
    reader = make_reader(connector(), BIG)
    assert reader.connect(source.peer) == ""
    read_id = reader.order(source.epoch, ALL, ALL)
    reader.wait_for_first_bytes()
    for _ in range(15):
        source.send(signal.SIGSTOP)
        time.sleep(0.2)
        source.send(signal.SIGCONT)
        time.sleep(0.002)
    assert reader.result(read_id, timeout=patience(20)).error == ""
