"""Choose streams to move between nodes that decode. Pure: routers with equal reports agree without messages.

Streams leave a node that leans to prefill, and balance decodes, by the costs of pdserve/request_cost.py. A stream
pauses while it moves, so it does not move to a node that computes many prompts. The last streams of a node do, if their
pause is no longer than the gap that prompts may cause anyway: without them the prompts of their node have no ITL
target. The way back would cost more than it saves, so no stream goes back and forth.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve import request_cost as cost
from router.fleet.policy import FleetSnapshot, NodeView, priced, prompt_shares

_TOKENS = cost.OUTPUT_TOKENS // 4  # output tokens that a move speeds up: half of the rest, as loads change
_LEAST = 0.01  # seconds of TTFT that a decision must save: one prompt alone makes a share of 5 % for a second
_COUNTS = (1, 2, 4, 8, 16, 32)  # streams that move between two nodes at a time
# Longest pause of a stream, and of the last streams of a node, in ITL targets. On a node that computes prompts in bulk,
# half a step takes 1/2 and a decode at least 1/9; the read is added. Simulated fleets differ little with 0.7 to 0.85;
# with 0.6 a burst of decodes stays on the nodes where it began.
_PAUSE = 0.75
_LAST_PAUSE = 1.0


class Move(NamedTuple):
    """Streams of this router to move, between nodes by id."""

    source: str
    target: str
    streams: int


class _Node(NamedTuple):
    """A node and the share of its time that it will spend on prompts."""

    view: NodeView
    prompt_share: float

    def saved(self, count: int) -> float:
        """Return the seconds that ``count`` streams fewer save on the node; if negative, minus the cost of more."""
        load = self.view.load
        decodes = load.to_decode

        def seconds(number: int) -> float:
            return cost.decodes_cost(load, self.view.costs, max(0, number), _TOKENS, self.prompt_share)

        return seconds(decodes) - seconds(decodes - count)

    @property
    def step(self) -> float:
        """Seconds of a step, with the waiting prompts, or with the usual number of them once the node has streams."""
        load = self.view.load
        decode = self.view.costs.decode.at(load.decoding)
        chunk = cost.longest_step(load.itl_target, decode) - decode if load.itl_target else 0.0
        return max(cost.step_seconds(load, self.view.costs), decode + min(load.prompt_share, 1.0) * chunk)


def moves(snapshot: FleetSnapshot) -> list[Move]:
    """Return the moves that save more than they cost; a node takes part in one at most, one without a price in none.

    Each router moves its share of a node's streams.
    """
    snapshot, typical = priced(snapshot)
    shares = prompt_shares(snapshot, typical)
    nodes = [_Node(node, shares[node.node_id]) for node in snapshot.usable("decode")]
    sources = sorted(nodes, key=lambda node: (node.saved(1), node.view.node_id))
    targets = sorted(nodes, key=lambda node: (-node.saved(-1), node.view.node_id))
    chosen: list[Move] = []
    while len(sources) > 1:
        targets.remove(source := sources.pop())
        if source.view.prefills and source.view.load.decoding:
            sources.remove(target := targets.pop(0))
            if target.view.reads_from(source.view) and (count := _best_count(source, target)):
                own = round(count * source.view.in_flight / max(1, source.view.load.requests))
                chosen += [Move(source.view.node_id, target.view.node_id, own)] if own else []
    return chosen


def _best_count(source: _Node, target: _Node) -> int:
    """Return how many streams to move; 0 if that saves nothing, or their pause would be too long."""
    decoding = source.view.load.decoding
    longest = max(source.view.load.itl_target, target.view.load.itl_target)
    best = 0
    most = _LEAST
    for count in {min(count, decoding) for count in _COUNTS}:
        pause = _pause_seconds(target, count)
        if pause > (_LAST_PAUSE if count == decoding else _PAUSE) * longest:
            continue
        saved = source.saved(count) + target.saved(-count) - cost.DELAY_WEIGHT * count * pause
        if saved > most:
            best = count
            most = saved
    return best


def _pause_seconds(target: _Node, count: int) -> float:
    """Predict the longest pause of ``count`` streams, which leave right behind a token.

    They are read one after the other, and wait for half a step and a decode of their new node.
    """
    read = cost.pull_seconds(target.view.costs, count * cost.PROMPT_TOKENS)
    decode = target.view.costs.decode.at(target.view.load.decoding + count)
    return read + target.step / 2 + decode
