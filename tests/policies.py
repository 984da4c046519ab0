"""Who may connect to whom, by the network policies of an overlay.

Source: https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overlays import Manifest, of_kind, selects

NAMESPACE = "ai"  # that the overlay is applied to
EVERY = range(1, 65536)


class Party(NamedTuple):
    """A pod with these labels. Who is in no namespace is no pod at all, and policies of others do not select it."""

    labels: dict[str, str]
    namespace: str


def open_ports(overlay: str, source: Party, target: Party) -> set[range]:
    """TCP ports of ``target`` that ``source`` may connect to."""
    leaving = _ports(overlay, "egress", source, target)
    entering = _ports(overlay, "ingress", target, source)
    both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in leaving for b in entering)
    return {ports for ports in both if ports}


def is_peer(peer: Manifest, party: Party) -> bool:
    """Whether that is whom a rule of this namespace means."""
    if "namespaceSelector" not in peer:
        return party.namespace == NAMESPACE and selects(peer["podSelector"], party.labels)
    named = {"kubernetes.io/metadata.name": party.namespace}
    return selects(peer["namespaceSelector"], named) and selects(peer.get("podSelector", {}), party.labels)


def _ports(overlay: str, direction: str, mine: Party, other: Party) -> set[range]:
    """Those that the policies of one side let through, in one direction."""
    if mine.namespace != NAMESPACE:
        return {EVERY}
    specs = [each["spec"] for each in of_kind(overlay, "NetworkPolicy")]
    found = [
        spec for spec in specs if direction.title() in spec["policyTypes"] and selects(spec["podSelector"], mine.labels)
    ]
    if not found:
        return {EVERY}
    return {ports for spec in found for rule in spec.get(direction, ()) for ports in _of_rule(rule, other)}


def _of_rule(rule: Manifest, other: Party) -> Iterator[range]:
    peers = rule.get("from", rule.get("to"))
    if peers is not None and not any(is_peer(peer, other) for peer in peers):
        return
    if "ports" not in rule:
        yield EVERY
    for port in rule.get("ports", ()):
        if port.get("protocol", "TCP") == "TCP":
            yield range(port["port"], port.get("endPort", port["port"]) + 1)
