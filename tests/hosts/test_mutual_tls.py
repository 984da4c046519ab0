"""Pods of the mtls overlay connect, hand off KV, and refuse clients and peers without a certificate."""

from __future__ import annotations

import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import ROOT, Cluster
from machine import patience
from network import require_namespaces
from node_client import RouterClient, greedy
from traffic import PROMPT

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_namespaces()
    with Cluster("mtls", tmp_path_factory.mktemp("mtls"), checkpoint) as cluster:
        cluster.wait_ready()
        yield cluster


def test_client_with_trusted_ca_is_served(cluster: Cluster) -> None:
    trust = ssl.create_default_context()
    cluster.ca.configure_trust(trust)
    body = {"model": cluster.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    with httpx.Client(base_url=cluster.url, verify=trust, trust_env=False, timeout=patience(30.0)) as client:
        answer = client.post("/v1/completions", json=body, headers=cluster.headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


def check_handoffs(cluster: Cluster) -> None:
    """Check that every P hands off to every D."""
    for decode in cluster.running_pods("decode"):
        before = decode.counter("handoffs")
        with RouterClient(decode.address, decode.channel()) as client:
            for prefill in cluster.running_pods("prefill"):
                answer = client.generate(PROMPT, greedy(8), prefill.name, cache_salt=uuid.uuid4().hex)
                assert len(answer.tokens) == 8
        assert decode.counter("handoffs") == before + len(cluster.running_pods("prefill"))
    for node in cluster.nodes:
        node.wait_idle()


def test_handoffs(cluster: Cluster) -> None:
    check_handoffs(cluster)


def test_distant_pods_connect(cluster: Cluster) -> None:
    """A round trip takes 0.4 s, and a new connection several of them."""
    cluster.network.delay(cluster.pods, cluster.pods, 0.2)
    try:
        cluster.restart(cluster.running_pods("prefill")[0].name)
        cluster.wait_connected(20.0)
        check_handoffs(cluster)
    finally:
        cluster.network.heal()


def test_connections_without_certificate_are_refused(cluster: Cluster) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(cluster.url.replace("https", "http"), trust_env=False)
    for node in cluster.nodes:
        with grpc.insecure_channel(node.address) as channel, pytest.raises(grpc.RpcError):
            pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest(), timeout=patience(5.0))


def test_probe_commands_succeed(cluster: Cluster) -> None:
    for node in cluster.nodes:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            program, *words = cluster.with_local_secrets(node.kind.container[kind]["exec"]["command"])
            assert program == "pdserve"
            try:
                cluster.network.run(node.name, "env", f"PYTHONPATH={ROOT}", sys.executable, "-Pm", "cli", *words)
            except subprocess.CalledProcessError as exc:
                pytest.fail(f"{kind} of {node.name}: {exc.stdout}{exc.stderr}")
