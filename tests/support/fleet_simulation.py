"""A discrete-event simulation of a fleet, driven by the router's real policies. Deterministic, and without processes.

Routers see reports that are up to 20 ms old, older beyond 40 nodes, and add the requests that they have sent since.
simulated_node.py has the nodes.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from simulated_node import BLOCK, Delays, Events, Job, SimulatedNode

from cli.plan.queues import percentile
from pdserve.request_cost import RequestLoad, StepCosts
from router.fleet.moves import Move, moves
from router.fleet.node_client import PAUSE, REPORTED
from router.fleet.nodes import REPORTS
from router.fleet.policy import FleetSnapshot, NodeView, Policy, PolicyRequest, prefix_aware
from router.fleet.stream_mover import MOST_STREAMS, MOVE_DISTANCE, MOVE_INTERVAL

MODEL = "m"
_STUCK = 600.0  # simulated seconds after the last arrival: then nothing ends any more

Moves = Callable[[FleetSnapshot], Sequence[Move]]


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
        self.shares: list[list[float]] = []  # fraction of time spent on prompts, by second, then by node
        self._events = Events()
        self._policy = policy
        self._find_moves = find_moves
        names = [f"n{number:02}" for number in range(len(roles))]
        self._nodes = {
            name: SimulatedNode(self._events, name, role, self, **node) for name, role in zip(names, roles, strict=True)
        }
        self._delays = node.get("delays", Delays())
        self._peers = frozenset(self._nodes)
        self._reports: dict[str, tuple[RequestLoad, StepCosts]] = {}
        self._routers = [_Router(number, number, {name: deque() for name in self._nodes}) for number in range(routers)]
        self._pause = max(PAUSE, len(roles) / REPORTS)
        self._left = 0

    def node(self, name: str) -> SimulatedNode:
        return self._nodes[name]

    def run(self, jobs: Sequence[Job]) -> None:
        """Serve jobs until all have ended."""
        self._left = len(jobs)
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
        self._events.after(1.0, self._observe)
        limit = max(job.at for job in jobs) + _STUCK
        while self._left:
            self._events.next()
            assert self._events.now < limit, f"{self._left} jobs do not end"

    def on_first_token(self, job: Job, handed_off_by: SimulatedNode | None) -> None:
        if handed_off_by is not None:
            self._routers[job.router].in_flight[handed_off_by.name] -= 1

    def on_end(self, job: Job) -> None:
        assert job.node is not None
        self._routers[job.router].in_flight[job.node.name] -= 1
        self._left -= 1

    def _observe(self) -> None:
        self.shares.append([node.prompt_share for node in self._nodes.values()])
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
        (load, costs), sent = self._reports[node.name], router.sent[node.name]
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
        choice = self._policy(self._snapshot(router), PolicyRequest(job.prompt))
        router.counter += 1
        decode = self._nodes[choice.decode]
        prefill = self._nodes[choice.prefill] if choice.prefill else None
        self._sent(router, decode, 0 if prefill else job.prompt, job.prompt)
        if prefill:
            self.handoffs += 1
            self._sent(router, prefill, job.prompt, job.prompt, for_peer=True)
        self._events.after(self._delays.request, partial(decode.serve, job, prefill))

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


# ---------------------------------------------------------------- loads and figures


def poisson(
    rate: float, seconds: float, prompt: float, output: float, seed: int = 1, start: float = 0.0, sigma: float = 0.8
) -> list[Job]:
    """Return Poisson arrivals with lognormal lengths of these means, at most 12,000 and 1,000 tokens."""
    rng, at, jobs = random.Random(seed), start, list[Job]()

    def length(mean: float, most: int) -> int:
        return min(most, max(16, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    while (at := at + rng.expovariate(rate)) < start + seconds:
        jobs.append(Job(at, length(prompt, 12_000), length(output, 1_000)))
    return jobs


@dataclass(frozen=True)
class Figures:
    """Results of jobs: seconds by percentile, the mean duration, and throughput."""

    ttft: dict[int, float]
    per_token: dict[int, float]
    longest_gap: dict[int, float]
    duration: float
    requests: float
    tokens: float

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Figures:
        decoded = [job for job in jobs if job.output > 1]

        def shares(values: Sequence[float]) -> dict[int, float]:
            return {share: percentile(values, share) for share in (50, 90, 99)}

        seconds = max(job.end for job in jobs) - jobs[0].at
        return cls(
            shares([job.ttft for job in jobs]),
            shares([job.per_token for job in decoded]),
            shares([job.longest_gap for job in decoded]),
            fmean(job.end - job.at for job in jobs),
            len(jobs) / seconds,
            sum(job.output for job in jobs) / seconds,
        )


# ---------------------------------------------------------------- two bursts


class Burst(NamedTuple):
    """A load per node; lengths are means in tokens."""

    name: str
    rate: float  # requests per second
    prompt: int
    output: int


BURSTS = (Burst("prompts", 6.0, 4000, 30), Burst("decodes", 25.0, 250, 400))


class Shift(NamedTuple):
    """Results of a fleet: of each burst, and the simulation."""

    phases: tuple[Figures, ...]
    simulation: Simulation


def shift(roles: Sequence[str], seconds: float, routers: int = 1) -> Shift:
    """Simulate one burst after the other, each for that time."""
    starts = [number * seconds for number in range(len(BURSTS))]
    phases = [
        poisson(burst.rate * len(roles), seconds, burst.prompt, burst.output, seed, start)
        for seed, (burst, start) in enumerate(zip(BURSTS, starts, strict=True))
    ]
    simulation = Simulation(roles, routers=routers)
    simulation.run([job for phase in phases for job in phase])
    return Shift(tuple(map(Figures.of, phases)), simulation)


def split(prefill: int, nodes: int) -> list[str]:
    return ["prefill"] * prefill + ["decode"] * (nodes - prefill)
