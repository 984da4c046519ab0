"""Links between hosts fail and heal under load; clients get the answers of an undisturbed cluster.

    fault                                       detected by                effect on requests
    partition of D and P, both ways or one way  D                          D computes the prompts itself
    partition of the router and a D             the router                 they continue at the other D
    a P or a D is isolated                      its peers and the router   as above
    a link is slow                              none                       they take longer

After each row the link heals: all nodes are connected, prompts are handed off, and no blocks are left.

    python -m pytest tests/hosts -m ""      the whole table, in minutes; scripts/test runs two rows
"""

from __future__ import annotations

import pytest
from cluster import Cluster
from traffic import Traffic, check_recovered, nodes_ready, wait

DETECTION_SECONDS = 15.0
HOSTS = {"router": "router", "D": "decode", "P": "prefill"}


def hosts_of(cluster: Cluster, role: str) -> list[str]:
    """Return the host names of a role, or of its first pod for "one D" and "one P"."""
    one, _, kind = role.rpartition(" ")
    names = [pod.name for pod in cluster.running_pods(HOSTS[kind])]
    return names[:1] if one else names


def others(cluster: Cluster, name: str) -> list[str]:
    return [host for host in cluster.network.names if host not in (name, "machine")]


def is_at_stage(cluster: Cluster, stage: str) -> bool:
    """Return whether a request is at the stage."""
    if stage == "computing":
        return any(node.status().running for node in cluster.running_pods("prefill"))
    if stage == "reading":
        return any(node.status().reading for node in cluster.running_pods("decode"))
    return any(node.status().running for node in cluster.running_pods("decode"))


def peers_are_lost(cluster: Cluster) -> bool:
    return not any(map(cluster.connected_prefills, cluster.running_pods("decode")))


@pytest.mark.parametrize(
    ("source", "target", "both_ways", "stage"),
    [
        pytest.param("D", "P", True, "computing"),
        pytest.param("D", "P", True, "reading", marks=pytest.mark.slow),
        pytest.param("D", "P", False, "computing", marks=pytest.mark.slow),
        pytest.param("P", "D", False, "reading", marks=pytest.mark.slow),
    ],
)
def test_requests_survive_a_partition_of_d_and_p(
    source: str, target: str, both_ways: bool, stage: str, cluster: Cluster, traffic: Traffic
) -> None:
    with traffic.running():
        cluster.wait_until(lambda: is_at_stage(cluster, stage), 20.0)
        cluster.network.partition(hosts_of(cluster, source), hosts_of(cluster, target), both_ways)
        cluster.wait_until(lambda: peers_are_lost(cluster), DETECTION_SECONDS)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_connected(20.0)
        wait(1.0)
    check_recovered(cluster)


@pytest.mark.parametrize(
    ("source", "target", "both_ways"),
    [
        pytest.param("router", "one D", True),
        pytest.param("router", "one D", False, marks=pytest.mark.slow),
        pytest.param("one D", "router", False, marks=pytest.mark.slow),
        pytest.param("router", "P", True, marks=pytest.mark.slow),
    ],
)
def test_requests_survive_a_partition_of_router_and_node(
    source: str, target: str, both_ways: bool, cluster: Cluster, traffic: Traffic
) -> None:
    all_ready = nodes_ready(cluster)
    with traffic.running():
        cluster.wait_until(lambda: is_at_stage(cluster, "decoding"), 20.0)
        cluster.network.partition(hosts_of(cluster, source), hosts_of(cluster, target), both_ways)
        cluster.wait_until(lambda: nodes_ready(cluster) != all_ready, DETECTION_SECONDS)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_until(lambda: nodes_ready(cluster) == all_ready, DETECTION_SECONDS)
        wait(1.0)
    check_recovered(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["one P", "one D"])
@pytest.mark.parametrize("visible", [False, True])
def test_requests_survive_an_isolated_node(role: str, visible: bool, cluster: Cluster, traffic: Traffic) -> None:
    """The node's packets are dropped silently, or its link is down (``visible``)."""
    all_ready = nodes_ready(cluster)
    (name,) = hosts_of(cluster, role)
    with traffic.running():
        cluster.wait_until(lambda: is_at_stage(cluster, "computing"), 20.0)
        if visible:
            cluster.network.unplug(name)
        else:
            cluster.network.partition([name], others(cluster, name))
        cluster.wait_until(lambda: nodes_ready(cluster) != all_ready, DETECTION_SECONDS)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_until(lambda: nodes_ready(cluster) == all_ready, DETECTION_SECONDS)
        wait(1.0)
    check_recovered(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.2])
@pytest.mark.parametrize("links", ["D and P", "all"])
def test_slow_links_lose_no_peer(links: str, seconds: float, cluster: Cluster, traffic: Traffic) -> None:
    """No peer counts as lost, and late reads still succeed."""
    losses = num_peer_losses(cluster)
    with traffic.running():
        pods = list(cluster.pods)
        sources = pods if links == "all" else hosts_of(cluster, "D")
        cluster.network.delay(sources, pods if links == "all" else hosts_of(cluster, "P"), seconds)
        wait(6.0)
    assert num_peer_losses(cluster) == losses
    check_recovered(cluster)


def num_peer_losses(cluster: Cluster) -> float:
    """Return how often decode nodes have lost a prefill node so far."""
    return sum(decode.counter("peer_losses") for decode in cluster.running_pods("decode"))


@pytest.mark.slow
def test_requests_survive_a_partition_during_a_transfer(cluster: Cluster, traffic: Traffic) -> None:
    """The link is slow first, so that the transfer is still running when it fails."""
    prefill = hosts_of(cluster, "P")
    decode = hosts_of(cluster, "D")

    def received() -> int:
        counts = cluster.network.update_switch().num_bytes
        return sum(counts.get(f"{p} {d}", 0) for p in prefill for d in decode)

    with traffic.running():
        cluster.network.delay(prefill, decode, 0.2)
        before = received()
        cluster.wait_until(lambda: is_at_stage(cluster, "reading") and received() > before + 500_000, 30.0)
        cluster.network.partition(prefill, decode)
        cluster.wait_until(lambda: peers_are_lost(cluster), DETECTION_SECONDS)
        cluster.network.heal()
        cluster.wait_connected(20.0)
    check_recovered(cluster)


@pytest.mark.slow
def test_router_keeps_its_nodes_without_the_api_server(cluster: Cluster, traffic: Traffic) -> None:
    """The router continues with the last known EndpointSlices."""
    all_ready = nodes_ready(cluster)
    with traffic.running():
        cluster.network.partition(hosts_of(cluster, "router"), ["api"])
        wait(10.0)
        assert nodes_ready(cluster) == all_ready
    check_recovered(cluster)
