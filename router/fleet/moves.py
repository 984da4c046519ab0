"""Which streams move between nodes that decode. Pure: routers with the same reports agree without talking.

Streams leave a node that leans to prefill, and balance decodes, by the costs of pdserve/request_cost.py. The way back
would cost more than it saves, so streams do not go back and forth.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve import request_cost as cost
from pdserve.request_cost import StepCosts
from router.fleet.policy import FleetSnapshot, NodeView, filled, typical_costs

_TOKENS = 50  # assumed rest of an answer
_MOVE_SECONDS = 2e-3  # cost of a move: a pause of 13 ms between two tokens
_CERTAIN = 0.8  # of what a move saves: the rest of an answer may be short, and reports are old
_OVERLOADED = 0.3  # seconds of prompts that wait on a node which no stream moves to
_COUNTS = (1, 2, 4, 8, 16, 32)  # streams that move between two nodes at a time


class Move(NamedTuple):
    """Streams of this router to move, between nodes by id."""

    source: str
    target: str
    streams: int


def moves(snapshot: FleetSnapshot) -> list[Move]:
    """Return the moves that save more than they cost; a node takes part in one at most.

    Each router moves its share of a node's streams.
    """
    nodes = snapshot.usable("decode")
    typical = snapshot.typical or typical_costs(nodes)
    ranked = sorted(nodes, key=lambda node: (_saved(node, _costs(node, typical), 1), node.node_id))
    found: list[Move] = []
    while len(ranked) > 1:
        source = ranked.pop()
        if source.prefills and (target := ranked.pop(0)).reads_from(source):
            count = _best_count(source, target, typical)
            own = round(count * source.in_flight / max(1, source.load.requests))
            found += [Move(source.node_id, target.node_id, own)] if own else []
    return found


def _best_count(source: NodeView, target: NodeView, typical: StepCosts) -> int:
    from_costs, to_costs = _costs(source, typical), _costs(target, typical)
    best, most = 0, 0.0
    if to_costs.prompt.at(target.load.backlog) > _OVERLOADED:
        return 0
    for count in {min(count, source.load.decoding) for count in _COUNTS}:
        saved = _CERTAIN * _saved(source, from_costs, count) + _saved(target, to_costs, -count) - count * _MOVE_SECONDS
        if saved > most:
            best, most = count, saved
    return best


def _costs(node: NodeView, typical: StepCosts) -> StepCosts:
    return filled(node.costs, typical)


def _saved(node: NodeView, costs: StepCosts, count: int) -> float:
    """Return what ``count`` streams fewer save on a node."""
    load, decodes = node.load, node.load.to_decode
    fewer = max(0, decodes - count)
    return cost.decodes_cost(load, costs, decodes, _TOKENS) - cost.decodes_cost(load, costs, fewer, _TOKENS)
