"""Which nodes serve a request: a pure function of a snapshot of the fleet."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.errors import Overloaded


class NodeView(msgspec.Struct, frozen=True):
    """A node as the router sees it. ``in_flight`` counts this router's requests there; on P, those still in prefill."""

    node_id: str
    role: str  # "prefill" or "decode"
    model: str
    ready: bool
    compat_hash: str = ""
    in_flight: int = 0
    connected_peers: frozenset[str] = frozenset()  # ids of the P that a D can read from


class Snapshot(msgspec.Struct, frozen=True):
    """``turn`` counts the choices made so far; ties go round by it."""

    model: str
    nodes: tuple[NodeView, ...]
    turn: int = 0

    def among(self, accepts: Callable[[NodeView], bool]) -> Snapshot:
        """The same with only those decode nodes that are accepted."""
        nodes = tuple(node for node in self.nodes if node.role != "decode" or accepts(node))
        return msgspec.structs.replace(self, nodes=nodes)


class Placement(msgspec.Struct, frozen=True):
    """Node ids. Without ``prefill`` the decode node computes the prompt itself."""

    decode: str
    prefill: str | None


def choose(snapshot: Snapshot) -> Placement:
    """The least loaded ready D of the model, then the least loaded ready P that it can read from.

    Raises Overloaded when there is no such D.
    """
    usable = [node for node in snapshot.nodes if node.ready and node.model == snapshot.model]
    decode = _least_loaded([node for node in usable if node.role == "decode"], snapshot.turn)
    if decode is None:
        raise no_decode_node(snapshot)
    prefill = _least_loaded(
        [
            node
            for node in usable
            if node.role == "prefill"
            and node.compat_hash == decode.compat_hash
            and node.node_id in decode.connected_peers
        ],
        snapshot.turn,
    )
    return Placement(decode.node_id, None if prefill is None else prefill.node_id)


def no_decode_node(snapshot: Snapshot) -> Overloaded:
    """The error for a fleet that cannot serve now; it names the models there are, where it is only the name."""
    others = sorted({node.model for node in snapshot.nodes if node.role == "decode" and node.ready})
    remedy = f"the ready ones serve {', '.join(map(repr, others))}" if others else "try again shortly"
    return Overloaded(f"no decode node of model {snapshot.model!r} is ready; {remedy}")


def _least_loaded(nodes: list[NodeView], turn: int) -> NodeView | None:
    if not nodes:
        return None
    least = min(node.in_flight for node in nodes)
    tied = [node for node in nodes if node.in_flight == least]
    return tied[turn % len(tied)]
