"""A discrete-event simulation of a fleet, driven by the router's real policies. Deterministic, and without processes.

Routers see reports that are up to 20 ms old, older beyond 40 nodes, and add the requests that they have sent since.
They know at once which prefixes a node has cached. Nodes do not pull prefixes from each other, except a stream's KV
when it moves.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cli.virtual_fleet.cards import MEASURED_DELAYS
from cli.virtual_fleet.events import Events
from cli.virtual_fleet.jobs import Job
from cli.virtual_fleet.node import BLOCK, SimulatedNode, Usage
from pdserve.hashing import BlockHashes, root_hash
from pdserve.request_cost import RequestLoad, StepCosts
from router.fleet.moves import Move, moves
from router.fleet.node_client import PAUSE, REPORTED
from router.fleet.nodes import REPORTS
from router.fleet.policy import FleetSnapshot, NodeView, Policy, PolicyRequest, prefix_aware
from router.fleet.stream_mover import MOST_STREAMS, MOVE_DISTANCE, MOVE_INTERVAL

MODEL = "m"
_STUCK = 600.0  # simulated seconds after the last arrival: then nothing ends any more

Moves = Callable[[FleetSnapshot], Sequence[Move]]


def split(prefill: int, nodes: int) -> list[str]:
    """Return the roles of a fleet of ``nodes``, of which the first ones prefill."""
    return ["prefill"] * prefill + ["decode"] * (nodes - prefill)


def never() -> bool:
    return False


def no_moves(snapshot: FleetSnapshot) -> Sequence[Move]:
    return ()


@dataclass
class _Router:
    """The knowledge of one router. ``views``: the last reports of its nodes. ``sent``: prompts since then, by node.

    An entry of ``sent`` is (time, uncached tokens, tokens, whether the prompt is for a peer).
    """

    number: int
    counter: int
    sent: dict[str, deque[tuple[float, int, int, bool]]]
    views: dict[str, NodeView] = field(default_factory=dict)
    in_flight: Counter[str] = field(default_factory=Counter)


class Simulation:
    """``roles`` names the role of each node; ``run`` serves jobs. Nodes whose roles are all "both" are elastic."""

    def __init__(
        self,
        roles: Sequence[str],
        policy: Policy = prefix_aware,
        find_moves: Moves = moves,
        routers: int = 1,
        **node: Any,
    ) -> None:
        """``node``: options of SimulatedNode."""
        self.handoffs = 0
        self.moves = 0
        self.given_up = False
        self.shares: list[list[float]] = []  # fraction of time spent on prompts, by second, then by node
        self.usage: list[list[Usage]] = []  # by second, then by node
        self._events = Events()
        self._policy = policy
        self._find_moves = find_moves
        names = [f"n{number:02}" for number in range(len(roles))]
        self._nodes = {
            name: SimulatedNode(self._events, name, role, self, **node) for name, role in zip(names, roles, strict=True)
        }
        self._delays = node.get("delays", MEASURED_DELAYS)
        self._peers = frozenset(self._nodes)
        self._reports: dict[str, tuple[RequestLoad, StepCosts]] = {}
        self._routers = [_Router(number, number, {name: deque() for name in self._nodes}) for number in range(routers)]
        self._pause = max(PAUSE, len(roles) / REPORTS)
        self._left = 0
        self._give_up = never

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._events.now

    def node(self, name: str) -> SimulatedNode:
        return self._nodes[name]

    def run(self, jobs: Sequence[Job], give_up: Callable[[], bool] = never) -> None:
        """Serve jobs until all awaited ones have ended, or ``give_up`` returns True: it is asked every second."""
        self._left = sum(job.awaited for job in jobs)
        self._give_up = give_up
        for number, job in enumerate(jobs):
            job.number = number
            job.router = number % len(self._routers)
            self._events.after(job.at, partial(self._place, job))
        for number, node in enumerate(self._nodes.values()):
            self._reports[node.name] = node.report()
            self._events.after(self._pause * number / len(self._nodes), partial(self._report, node))
        if "both" in [node.role for node in self._nodes.values()]:
            for router in self._routers:
                self._events.after(MOVE_INTERVAL, partial(self._move, router))
        self._events.after(0.0, self._observe)
        limit = max(job.at for job in jobs) + _STUCK
        while self._left and not self.given_up:
            self._events.next()
            assert self._events.now < limit, f"{self._left} jobs do not end"

    def on_first_token(self, job: Job, handed_off_by: SimulatedNode | None) -> None:
        if handed_off_by is not None:
            self._routers[job.router].in_flight[handed_off_by.name] -= 1

    def on_end(self, job: Job) -> None:
        self._routers[job.router].in_flight[job.node] -= 1
        self._left -= job.awaited

    def _observe(self) -> None:
        self.shares.append([node.prompt_share for node in self._nodes.values()])
        self.usage.append([node.usage for node in self._nodes.values()])
        self.given_up = self._give_up()
        self._events.after(1.0, self._observe)

    def _report(self, node: SimulatedNode) -> None:
        self._reports[node.name] = node.report()
        for router in self._routers:
            sent = router.sent[node.name]
            while sent and sent[0][0] < self._events.now - REPORTED:
                sent.popleft()
            router.views.pop(node.name, None)
        self._events.after(self._pause, partial(self._report, node))

    # ------------------------------------------------------------ routers

    def _snapshot(self, router: _Router) -> FleetSnapshot:
        views = tuple(router.views.get(name) or self._view(router, node) for name, node in self._nodes.items())
        return FleetSnapshot(MODEL, views, router.counter)

    def _view(self, router: _Router, node: SimulatedNode) -> NodeView:
        """See NodeClient.view."""
        load, costs = self._reports[node.name]
        sent = router.sent[node.name]
        load = msgspec.structs.replace(
            load,
            requests=load.requests + len(sent),
            backlog=load.backlog + sum(uncached for _, uncached, _, _ in sent),
            free_blocks=max(0, load.free_blocks - sum(-(-tokens // BLOCK) for _, _, tokens, _ in sent)),
            for_peers=load.for_peers + sum(for_peer for _, _, _, for_peer in sent),
        )
        view = NodeView(
            node_id=node.name,
            role=node.role,
            model=MODEL,
            ready=True,
            connected_peers=self._peers,
            in_flight=router.in_flight[node.name],
            load=load,
            costs=costs,
        )
        router.views[node.name] = view
        return view

    def _place(self, job: Job) -> None:
        router = self._routers[job.router]
        request = PolicyRequest(job.prompt, self._cached(job))
        choice = self._policy(self._snapshot(router), request)
        router.counter += 1
        decode = self._nodes[choice.decode]
        prefill = self._nodes[choice.prefill] if choice.prefill else None
        self._sent(router, decode, 0 if prefill else request.uncached(decode.name), job.prompt)
        if prefill:
            self.handoffs += 1
            self._sent(router, prefill, request.uncached(prefill.name), job.prompt, for_peer=True)
        self._events.after(self._delays.request, partial(decode.serve, job, prefill))

    def _cached(self, job: Job) -> dict[str, int]:
        """Return the leading tokens of a prompt in each node's prefix cache, by node, zeros left out."""
        if not job.shared:
            return {}
        hashes = BlockHashes(BLOCK, root_hash(""))
        token_ids = array("I", job.prompt_ids())
        counts = {
            name: node.cached_tokens(hashes.one_by_one(token_ids, job.prompt)) for name, node in self._nodes.items()
        }
        return {name: count for name, count in counts.items() if count}

    def _sent(self, router: _Router, node: SimulatedNode, uncached: int, tokens: int, for_peer: bool = False) -> None:
        router.in_flight[node.name] += 1
        router.sent[node.name].append((self._events.now, uncached, tokens, for_peer))
        router.views.pop(node.name, None)

    def _move(self, router: _Router) -> None:
        """See StreamMover."""
        for source, target, number in self._find_moves(self._snapshot(router)):
            for order in range(min(number, MOST_STREAMS)):
                self._events.after(order * MOVE_DISTANCE, partial(self._move_one, router, source, target))
        self._events.after(MOVE_INTERVAL, partial(self._move, router))

    def _move_one(self, router: _Router, source: str, target: str) -> None:
        node = self._nodes[source]
        if jobs := node.movable(router.number):
            job = jobs[0]
            self._sent(router, self._nodes[target], 0, job.prompt + job.tokens)
            router.in_flight[source] -= 1
            node.move(job, self._nodes[target])
            self.moves += 1
