"""Listening ports and connections of the pods are exactly what the overlay's network policies allow.

Two differences to a cluster: names come from /etc/hosts, so port 53 of DNS is not used, and the API server listens on
6443 only, while policies also allow 443.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import httpx
import pytest
from cluster import PORTS, Cluster
from traffic import check_recovered

Connection = tuple[str, str, int]  # from, to, port
Rule = tuple[str, str, int, int]  # from, to, first port, last port

UCX = (20000, 20255)


def listening(cluster: Cluster, name: str) -> set[int]:
    """Return the TCP ports of a host that other hosts could reach."""
    lines = cluster.network.run(name, "ss", "--no-header", "--listening", "--tcp", "--numeric").splitlines()
    addresses = [line.split()[3].rpartition(":") for line in lines]
    return {int(port) for host, _, port in addresses if host not in ("127.0.0.1", "[::1]")}


def connected(cluster: Cluster) -> set[Connection]:
    """Return all connections so far between existing hosts, without the probes of the machine."""
    gone = cluster.pods.keys() - {pod.name for pod in cluster.running}
    opened = {(source, target, port) for source, target, port, _ in cluster.network.update_switch().opened}
    return {connection for connection in opened if connection[0] != "machine" and not gone & {*connection[:2]}}


def not_allowed(connections: Iterable[Connection], rules: Iterable[Rule]) -> set[Connection]:
    """Return the connections that no rule covers."""
    rules = list(rules)
    return {connection for connection in connections if not any(covers(rule, connection) for rule in rules)}


def not_used(connections: Iterable[Connection], rules: Iterable[Rule]) -> set[Rule]:
    """Return the rules that cover no connection."""
    connections = list(connections)
    return {rule for rule in rules if not any(covers(rule, connection) for connection in connections)}


def covers(rule: Rule, connection: Connection) -> bool:
    return rule[:2] == connection[:2] and rule[2] <= connection[2] <= rule[3]


def opened(cluster: Cluster) -> list[Rule]:
    """Return the policies' rules between existing hosts.

    They exclude rules for a name server and for other hosts that could be an API server.
    """
    sources = [*cluster.pods, "client", "prometheus"]
    targets = [*(pod.name for pod in cluster.running), "api"]
    rules = [rule for rule in cluster.allowed_connections() if rule[0] in sources and rule[1] in targets]
    return [rule for rule in rules if rule[1] in cluster.pods or rule[2] in (443, 6443)]


def shifted(rules: list[Rule], port: int) -> list[Rule]:
    """Return the rules with a mistyped port: the rule that begins at ``port`` is moved by 1000."""
    return [(a, b, first + 1000, last + 1000) if first == port else (a, b, first, last) for a, b, first, last in rules]


def test_every_listening_port_is_allowed_by_a_policy_and_the_reverse(cluster: Cluster) -> None:
    rules = opened(cluster)
    for pod in cluster.running:
        name = pod.name
        ports = listening(cluster, pod.name)
        assert PORTS[pod.role] in ports
        incoming = [rule for rule in rules if rule[1] == name]
        assert not [port for port in ports if not any(first <= port <= last for _, _, first, last in incoming)]
        assert not [rule for rule in incoming if not any(rule[2] <= port <= rule[3] for port in ports)]


def test_connections_are_exactly_the_allowed_ones(cluster: Cluster) -> None:
    for url in (f"{cluster.url}/v1/models", *(f"http://{pod.metrics}/metrics" for pod in cluster.running)):
        assert httpx.get(url, headers=cluster.headers, trust_env=False).status_code == 200
    connections = connected(cluster)
    rules = opened(cluster)
    assert not not_allowed(connections, rules)
    (router,) = [pod.name for pod in cluster.running_pods("router")]
    # Two nodes have one connection of UCX, from either; that of a handoff is from D.
    nodes = cluster.nodes
    handoffs = {"decode": "prefill"}
    answers = {(a.name, b.name, *UCX) for a in nodes for b in nodes if handoffs.get(a.role) != b.role}
    idle = {(router, "api", 443, 443), ("prometheus", router, 8000, 8000)}
    assert not_used(connections, rules) - answers == idle, (
        "this API server listens on 6443, and all hosts may use the API"
    )
    for port in {first for _, _, first, _ in rules} - {443}:
        assert not_allowed(connections, shifted(rules, port)), f"a policy without port {port} would break no connection"


@pytest.mark.slow
def test_wrong_ucx_port_range_prevents_peer_connections(cluster: Cluster) -> None:
    """The switch refuses exactly the connections from D to P; after the fix, all nodes are as before."""
    right = list(cluster.allowed_connections())
    decodes = cluster.running_pods("decode")
    prefills = cluster.running_pods("prefill")
    cluster.network.allow(shifted(right, UCX[0]))
    try:
        cluster.network.partition([pod.name for pod in decodes], [pod.name for pod in prefills])
        cluster.wait_until(lambda: not any(map(cluster.connected_prefills, decodes)), 15.0)
        cluster.network.heal()
        time.sleep(6.0)
        assert not any(map(cluster.connected_prefills, decodes))
        report = cluster.network.update_switch()
        refused = {(source, target) for source, target, _, allowed in report.opened if not allowed}
        tried = {(d.name, p.name) for d in decodes for p in prefills}
        assert tried <= refused <= tried | {(p, d) for d, p in tried}, "P reads from D as well"
    finally:
        cluster.network.allow(right)
    check_recovered(cluster)
