"""Endpoints of a service, with an API that forgets, fails and closes connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, endpoint_slice, running_cluster

from pdserve.discovery.kubernetes import Cluster, ServiceEndpoints, addresses_of
from pdserve.errors import ConfigError

Next = Callable[[], Awaitable[set[str]]]


def watch(tmp_path: Path, scenario: Callable[[FakeCluster, Next], Awaitable[None]]) -> None:
    """Run a scenario with a cluster and a function that returns the next reported addresses."""
    (tmp_path / "token").write_text("first\n")

    async def run() -> None:
        async with running_cluster() as cluster:
            source = ServiceEndpoints(Cluster(cluster.url, tmp_path / "token"), "ai", "prefill", "grpc")
            async with asyncio.timeout(30), aclosing(source.addresses()) as answers:

                async def following() -> set[str]:
                    return set(await anext(answers))

                await scenario(cluster, following)

    asyncio.run(run())


def test_endpoint_changes_are_reported(tmp_path: Path) -> None:
    async def scenario(cluster: FakeCluster, following: Next) -> None:
        await cluster.put(endpoint_slice("a", ["10.0.0.1"]))
        assert await following() == {"10.0.0.1:9001"}
        await cluster.put(endpoint_slice("b", ["fd00::1"], ready=None, port=9002))
        assert await following() == {"10.0.0.1:9001", "[fd00::1]:9002"}
        await cluster.put(endpoint_slice("a", ["10.0.0.7"]))
        assert await following() == {"10.0.0.7:9001", "[fd00::1]:9002"}
        await cluster.put(endpoint_slice("a", ["10.0.0.7"], ready=False))
        assert await following() == {"[fd00::1]:9002"}
        await cluster.delete("b")
        assert await following() == set()
        assert cluster.num_lists == 1
        query, authorization = cluster.seen[0]
        assert query == {"labelSelector": "kubernetes.io/service-name=prefill"}
        assert authorization == "Bearer first"

    watch(tmp_path, scenario)


def test_ended_watch_resumes_after_the_last_bookmark_with_a_new_token(tmp_path: Path) -> None:
    async def scenario(cluster: FakeCluster, following: Next) -> None:
        await cluster.put(endpoint_slice("a", ["10.0.0.1"]))
        await following()
        next_one = asyncio.ensure_future(following())
        await cluster.wait_for_requests(2)
        await cluster.bookmark()
        version = str(int(cluster.seen[1][0]["resourceVersion"]) + 1)
        (tmp_path / "token").write_text("second\n")
        while cluster.seen[-1][0].get("resourceVersion") != version:  # until the bookmark has been read
            count = len(cluster.seen)
            cluster.end_watches()
            await cluster.wait_for_requests(count + 1)
        await cluster.put(endpoint_slice("b", ["10.0.0.2"]))
        assert await next_one == {"10.0.0.1:9001", "10.0.0.2:9001"}
        assert cluster.num_lists == 1
        assert cluster.seen[-1][1] == "Bearer second"

    watch(tmp_path, scenario)


def test_expired_watch_lists_again(tmp_path: Path) -> None:
    async def scenario(cluster: FakeCluster, following: Next) -> None:
        await cluster.put(endpoint_slice("a", ["10.0.0.1"]))
        await following()
        await cluster.put(endpoint_slice("a", ["10.0.0.2"]))
        cluster.forget()
        assert await following() == {"10.0.0.2:9001"}
        assert cluster.num_lists == 2

    watch(tmp_path, scenario)


@pytest.mark.parametrize("status", [410, 401, 500])
def test_known_endpoints_stay_while_the_api_fails(tmp_path: Path, status: int) -> None:
    async def scenario(cluster: FakeCluster, following: Next) -> None:
        await cluster.put(endpoint_slice("a", ["10.0.0.1"]))
        await following()
        next_one = asyncio.ensure_future(following())
        await cluster.wait_for_requests(2)
        cluster.fail_with = status
        cluster.end_watches()
        await cluster.wait_for_requests(4)
        assert not next_one.done()
        cluster.fail_with = 0
        await cluster.put(endpoint_slice("a", ["10.0.0.3"]))
        assert await next_one == {"10.0.0.3:9001"}

    watch(tmp_path, scenario)


@pytest.mark.parametrize(
    ("item", "port", "addresses"),
    [
        (endpoint_slice("a", ["10.0.0.1"]), "7000", {"10.0.0.1:7000"}),
        (endpoint_slice("a", ["10.0.0.1"]), "http", set()),
        ({"metadata": {"name": "a"}, "endpoints": None, "ports": None}, "grpc", set()),
        (
            {"endpoints": [{"addresses": ["h.example"]}], "ports": [{"name": "grpc", "port": 1}]},
            "grpc",
            {"h.example:1"},
        ),
    ],
)
def test_ports_by_number_and_name(item: dict[str, Any], port: str, addresses: set[str]) -> None:
    assert addresses_of([item], port) == addresses


def test_cluster_credentials_come_from_the_environment(tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::a", "KUBERNETES_SERVICE_PORT": "6443"}
    cluster = Cluster.from_environment(environ, tmp_path)
    assert cluster.url == "https://[fd00::a]:6443"
    assert (cluster.token_file, cluster.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set here"):
        Cluster.from_environment({}, tmp_path)
