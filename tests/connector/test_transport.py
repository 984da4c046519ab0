"""Transports of connections: parsed from UCX's lanes, and reported by real connections."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kv_nodes import Reader, Source

from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.nixl_connector import NixlConnector
from connector.backends.nixl.transport import transport_of
from connector.setup import ConnectorSetup
from pdserve.kv.layout import FullAttentionSpec, KVLayout
from pdserve.kv.transports import TRANSPORTS, UNKNOWN, Connected, combine

LAYOUT = KVLayout(
    num_blocks=16, block_size=16, kernel_block_size=16, num_layers=1, spec=FullAttentionSpec(1, 16, "float32")
)
LOOPBACK = "rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)"


@pytest.mark.parametrize(
    ("lanes", "device", "kind"),
    [
        (LOOPBACK, "cpu", "shm"),
        (LOOPBACK, "cuda", "tcp"),
        ("rma_am(tcp/lo) amo_am(tcp/lo) am(tcp/lo tcp/eth0) ka(tcp/lo)", "cpu", "tcp"),
        ("rma(rc_mlx5/mlx5_0:1/path0) am(rc_mlx5/mlx5_0:1/path1) ka(ud_mlx5/mlx5_0:1)", "cpu", "rdma"),
        ("rma(rc_verbs/mlx5_0:1/path0) am(tcp/eth0)", "cuda", "rdma"),
        ("rma_am(tcp/eth0) am(tcp/eth0 cma/memory cuda_ipc/cuda)", "cuda", "nvlink"),
        ("rma_am(tcp/eth0) am(tcp/eth0 cma/memory cuda_ipc/cuda)", "cpu", "shm"),
        ("", "cpu", "unknown"),
    ],
)
def test_the_fastest_lane_for_the_memory_is_the_transport(lanes: str, device: str, kind: str) -> None:
    assert transport_of(lanes, device) == kind


def test_a_requirement_is_met_by_its_transport_and_faster_ones() -> None:
    for index, required in enumerate(TRANSPORTS):
        met = [kind for kind in (*TRANSPORTS, "unknown") if Connected("e", kind).meets(required)]
        assert met == list(TRANSPORTS[index:])


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [(["tcp"], "tcp"), (["nvlink", "shm", "rdma"], "shm"), (["nvlink", UNKNOWN], UNKNOWN), (["shm", "shm"], "shm")],
)
def test_the_slowest_rank_is_the_transport_of_a_peer(kinds: list[str], kind: str) -> None:
    assert combine([Connected("e", transport, f"lane/{transport}") for transport in kinds]).transport == kind


def test_equal_lanes_are_named_once() -> None:
    parts = [Connected("e", "shm", lanes) for lanes in ("a/x", "b/y", "a/x")]
    assert combine(parts) == Connected("e", "shm", "a/x | b/y")


@pytest.mark.parametrize(("tls", "kind"), [(None, "shm"), ("tcp", "tcp")])
def test_each_connection_reports_its_transport(tls: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second one with equal lanes, which UCX does not log."""
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    reader = Reader(NixlConnector(ConnectorSetup(f"reader-{os.urandom(4).hex()}")), LAYOUT)
    sources = [Source(f"source-{os.urandom(4).hex()}", LAYOUT) for _ in range(2)]
    try:
        for source in sources:
            reader.connector.connect(source.peer)
            (connection,) = reader.wait(lambda output: bool(output.connected or output.failed_peers))[-1].connected
            assert (connection.epoch, connection.transport) == (source.epoch, kind)
            assert "tcp/" in connection.lanes
    finally:
        reader.connector.close()
        for source in sources:
            source.kill()


def test_agents_map_no_files_or_segments_that_a_killed_process_may_leave() -> None:
    """UCX removes their names once they are mapped. A process that dies before leaves 4 MB in /dev/shm for ever."""
    agent = NixlAgent("an agent without segments")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    agent.close()
    assert [line for line in mapped if "ucx_shm_posix" in line or "SYSV" in line] == []
