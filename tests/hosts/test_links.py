"""Links between hosts are cut, delayed and healed under load; clients get the answers of an undisturbed cluster.

    fault                                     noticed by                 what becomes of requests
    D and P lose each other, or one of them   D                          D computes the prompts itself
    a router and a D lose each other          the router                 they go on at the other D
    a P, or a D, is alone                     all who used it            as above
    a link is slow                            nobody                     they take longer

After each the link heals: everybody is connected again, prompts are handed over as before, nothing is left.

    python -m pytest tests/hosts -m ""      all of the table, in minutes; scripts/test runs two rows
"""

from __future__ import annotations

import pytest
from cluster import Cluster
from traffic import Traffic, check_as_before, nodes_ready, wait

NOTICED = 15.0  # seconds
HOSTS = {"router": "router", "D": "decode", "P": "prefill"}


def names(cluster: Cluster, role: str) -> list[str]:
    """Of the hosts that a fault strikes: the router, all D's, all P's; of "one D" and "one P" the first."""
    one, _, kind = role.rpartition(" ")
    found = [pod.name for pod in cluster.of(HOSTS[kind])]
    return found[:1] if one else found


def others(cluster: Cluster, name: str) -> list[str]:
    return [each for each in cluster.network.names if each not in (name, "machine")]


def is_struck(cluster: Cluster, stage: str) -> bool:
    """Whether some request is at the stage."""
    if stage == "computing":
        return any(node.status().running for node in cluster.of("prefill"))
    if stage == "reading":
        return any(node.status().reading for node in cluster.of("decode"))
    return any(node.status().running for node in cluster.of("decode"))


def peers_are_lost(cluster: Cluster) -> bool:
    return all(not node.describe().connected_peers for node in cluster.of("decode"))


@pytest.mark.parametrize(
    ("source", "target", "both_ways", "stage"),
    [
        pytest.param("D", "P", True, "computing"),
        pytest.param("D", "P", True, "reading", marks=pytest.mark.slow),
        pytest.param("D", "P", False, "computing", marks=pytest.mark.slow),
        pytest.param("P", "D", False, "reading", marks=pytest.mark.slow),
    ],
)
def test_d_and_p_lose_each_other(
    source: str, target: str, both_ways: bool, stage: str, cluster: Cluster, known: Traffic
) -> None:
    with known.running():
        cluster.wait_until(lambda: is_struck(cluster, stage), 20.0)
        cluster.network.cut(names(cluster, source), names(cluster, target), both_ways)
        cluster.wait_until(lambda: peers_are_lost(cluster), NOTICED)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_connected(20.0)
        wait(1.0)
    check_as_before(cluster)


@pytest.mark.parametrize(
    ("source", "target", "both_ways"),
    [
        pytest.param("router", "one D", True),
        pytest.param("router", "one D", False, marks=pytest.mark.slow),
        pytest.param("one D", "router", False, marks=pytest.mark.slow),
        pytest.param("router", "P", True, marks=pytest.mark.slow),
    ],
)
def test_the_router_loses_a_node(source: str, target: str, both_ways: bool, cluster: Cluster, known: Traffic) -> None:
    whole = nodes_ready(cluster)
    with known.running():
        cluster.wait_until(lambda: is_struck(cluster, "decoding"), 20.0)
        cluster.network.cut(names(cluster, source), names(cluster, target), both_ways)
        cluster.wait_until(lambda: nodes_ready(cluster) != whole, NOTICED)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_until(lambda: nodes_ready(cluster) == whole, NOTICED)
        wait(1.0)
    check_as_before(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["one P", "one D"])
@pytest.mark.parametrize("visible", [False, True])
def test_a_node_is_alone(role: str, visible: bool, cluster: Cluster, known: Traffic) -> None:
    """Its packets are lost, or its cable is out."""
    whole = nodes_ready(cluster)
    (name,) = names(cluster, role)
    with known.running():
        cluster.wait_until(lambda: is_struck(cluster, "computing"), 20.0)
        if visible:
            cluster.network.unplug(name)
        else:
            cluster.network.cut([name], others(cluster, name))
        cluster.wait_until(lambda: nodes_ready(cluster) != whole, NOTICED)
        wait(1.0)
        cluster.network.heal()
        cluster.wait_until(lambda: nodes_ready(cluster) == whole, NOTICED)
        wait(1.0)
    check_as_before(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.2])
@pytest.mark.parametrize("who", ["D and P", "everybody"])
def test_a_link_is_slow(who: str, seconds: float, cluster: Cluster, known: Traffic) -> None:
    """Nothing is taken for dead. What is read late is read all the same."""
    losses = lost(cluster)
    with known.running():
        pods = list(cluster.pods)
        ones = pods if who == "everybody" else names(cluster, "D")
        cluster.network.delay(ones, pods if who == "everybody" else names(cluster, "P"), seconds)
        wait(6.0)
    assert lost(cluster) == losses
    check_as_before(cluster)


def lost(cluster: Cluster) -> float:
    """Connections to P's so far."""
    return sum(decode.counter("peer_losses") for decode in cluster.of("decode"))


@pytest.mark.slow
def test_a_cut_in_the_middle_of_a_transfer(cluster: Cluster, known: Traffic) -> None:
    """The link is slow first, so that a transfer takes long."""
    prefill, decode = names(cluster, "P"), names(cluster, "D")

    def received() -> int:
        counts = cluster.network.order().num_bytes
        return sum(counts.get(f"{p} {d}", 0) for p in prefill for d in decode)

    with known.running():
        cluster.network.delay(prefill, decode, 0.2)
        before = received()
        cluster.wait_until(lambda: is_struck(cluster, "reading") and received() > before + 500_000, 30.0)
        cluster.network.cut(prefill, decode)
        cluster.wait_until(lambda: peers_are_lost(cluster), NOTICED)
        cluster.network.heal()
        cluster.wait_connected(20.0)
    check_as_before(cluster)


@pytest.mark.slow
def test_the_router_loses_the_api_server(cluster: Cluster, known: Traffic) -> None:
    """What was known of EndpointSlices stays."""
    whole = nodes_ready(cluster)
    with known.running():
        cluster.network.cut(names(cluster, "router"), ["api"])
        wait(10.0)
        assert nodes_ready(cluster) == whole
    check_as_before(cluster)
