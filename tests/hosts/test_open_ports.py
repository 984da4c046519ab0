"""What hosts listen on, and who connects to whom, is what the overlay's network policies open, and nothing else.

Names come from /etc/hosts here, so DNS' port 53 is not asked for; and an API server listens at 6443 or at 443.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import httpx
import pytest
from cluster import PORTS, Cluster
from traffic import check_as_before

Connection = tuple[str, str, int]  # from, to, port
Rule = tuple[str, str, int, int]  # from, to, first port, last port

UCX = (20000, 20255)


def listening(cluster: Cluster, name: str) -> set[int]:
    """TCP ports of a host that others could reach."""
    lines = cluster.network.run(name, "ss", "--no-header", "--listening", "--tcp", "--numeric").splitlines()
    addresses = [line.split()[3].rpartition(":") for line in lines]
    return {int(port) for host, _, port in addresses if host not in ("127.0.0.1", "[::1]")}


def connected(cluster: Cluster) -> set[Connection]:
    """All that there are or have been between hosts that are there, but for those of the machine's own probes."""
    gone = cluster.pods.keys() - {pod.name for pod in cluster.running}
    opened = {(source, target, port) for source, target, port, _ in cluster.network.order().opened}
    return {each for each in opened if each[0] != "machine" and not gone & {*each[:2]}}


def not_opened(connections: Iterable[Connection], rules: Iterable[Rule]) -> set[Connection]:
    """Those that no rule is for."""
    rules = list(rules)
    return {each for each in connections if not any(covers(rule, each) for rule in rules)}


def not_used(connections: Iterable[Connection], rules: Iterable[Rule]) -> set[Rule]:
    """Those that no connection is for."""
    connections = list(connections)
    return {rule for rule in rules if not any(covers(rule, each) for each in connections)}


def covers(rule: Rule, connection: Connection) -> bool:
    return rule[:2] == connection[:2] and rule[2] <= connection[2] <= rule[3]


def opened(cluster: Cluster) -> list[Rule]:
    """What the policies open of what is there; a name server is not, nor are others where an API server could be."""
    sources = [*cluster.pods, "client", "prometheus"]
    targets = [*(pod.name for pod in cluster.running), "api"]
    found = [rule for rule in cluster.allowed() if rule[0] in sources and rule[1] in targets]
    return [rule for rule in found if rule[1] in cluster.pods or rule[2] in (443, 6443)]


def moved(rules: list[Rule], port: int) -> list[Rule]:
    """As if this port, or the range that begins with it, had been mistyped."""
    return [(a, b, first + 1000, last + 1000) if first == port else (a, b, first, last) for a, b, first, last in rules]


def test_hosts_listen_on_what_is_opened_to_somebody(cluster: Cluster) -> None:
    rules = opened(cluster)
    for pod in cluster.running:
        name, ports = pod.name, listening(cluster, pod.name)
        assert PORTS[pod.role] in ports
        to_it = [rule for rule in rules if rule[1] == name]
        assert not [port for port in ports if not any(first <= port <= last for _, _, first, last in to_it)]
        assert not [rule for rule in to_it if not any(rule[2] <= port <= rule[3] for port in ports)]


def test_connections_are_those_that_are_opened(cluster: Cluster) -> None:
    for url in (cluster.url, *(f"http://{pod.metrics}" for pod in cluster.running)):
        assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 200
    found, rules = connected(cluster), opened(cluster)
    assert not not_opened(found, rules)
    (router,) = [pod.name for pod in cluster.of("router")]
    answers = {(p.name, d.name, *UCX) for p in cluster.of("prefill") for d in cluster.of("decode")}
    assert not_used(found, rules) - answers == {(router, "api", 443, 443)}, "this API server listens on 6443"
    for port in {first for _, _, first, _ in rules} - {443}:
        assert not_opened(found, moved(rules, port)), "a policy with another port would not do"


@pytest.mark.slow
def test_what_no_policy_opens_stays_closed(cluster: Cluster) -> None:
    """With another range for UCX nothing is handed over, and requests are served all the same; nor is anything lost."""
    right = list(cluster.allowed())
    decodes, prefills = cluster.of("decode"), cluster.of("prefill")
    cluster.network.allow(moved(right, UCX[0]))
    try:
        cluster.network.cut([pod.name for pod in decodes], [pod.name for pod in prefills])
        cluster.wait_until(lambda: not any(pod.describe().connected_peers for pod in decodes), 15.0)
        cluster.network.heal()
        time.sleep(6.0)
        assert not any(pod.describe().connected_peers for pod in decodes)
        refused = {(source, target) for source, target, _, allowed in cluster.network.order().opened if not allowed}
        assert refused == {(d.name, p.name) for d in decodes for p in prefills}
    finally:
        cluster.network.allow(right)
    check_as_before(cluster)
