"""Connections that the network policies of an overlay allow.

Source: https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overlays import Manifest, of_kind, selects

NAMESPACE = "ai"  # namespace of the overlay
EVERY = range(1, 65536)


class Endpoint(NamedTuple):
    """A pod with these labels. An empty namespace means a host outside the cluster, which no policy selects."""

    labels: dict[str, str]
    namespace: str


def open_ports(overlay: str, source: Endpoint, target: Endpoint) -> set[range]:
    """Return the TCP ports of ``target`` that ``source`` may connect to."""
    leaving = _ports(overlay, "egress", source, target)
    entering = _ports(overlay, "ingress", target, source)
    both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in leaving for b in entering)
    return {ports for ports in both if ports}


def peer_selects(peer: Manifest, endpoint: Endpoint) -> bool:
    """Return whether a peer of a rule in this namespace selects the endpoint."""
    if "namespaceSelector" not in peer:
        return endpoint.namespace == NAMESPACE and selects(peer["podSelector"], endpoint.labels)
    named = {"kubernetes.io/metadata.name": endpoint.namespace}
    return selects(peer["namespaceSelector"], named) and selects(peer.get("podSelector", {}), endpoint.labels)


def _ports(overlay: str, direction: str, mine: Endpoint, other: Endpoint) -> set[range]:
    """Return the ports that the policies of one endpoint allow in one direction."""
    if mine.namespace != NAMESPACE:
        return {EVERY}
    specs = [policy["spec"] for policy in of_kind(overlay, "NetworkPolicy")]
    applying = [
        spec for spec in specs if direction.title() in spec["policyTypes"] and selects(spec["podSelector"], mine.labels)
    ]
    if not applying:
        return {EVERY}
    return {ports for spec in applying for rule in spec.get(direction, ()) for ports in _ports_of_rule(rule, other)}


def _ports_of_rule(rule: Manifest, other: Endpoint) -> Iterator[range]:
    peers = rule.get("from", rule.get("to"))
    if peers is not None and not any(peer_selects(peer, other) for peer in peers):
        return
    if "ports" not in rule:
        yield EVERY
    for port in rule.get("ports", ()):
        if port.get("protocol", "TCP") == "TCP":
            yield range(port["port"], port.get("endPort", port["port"]) + 1)
