"""Requests of a random world: their ways to KV, what happens to them, and how they are drawn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from feature_table import CHOICES, Cell, Feature
from lease_sides import Job
from toy import reference
from toy_node import BLOCK

from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams

NODES = 3
LONGEST = 44  # tokens of a prompt
MOST_OUTPUT = 14
#: Features of a node on which many requests meet, of prompts that others had before, and of KV that peers have.
AT_HOME = (Feature.HOST, Feature.DISK, Feature.PREEMPTION)
OF_PEERS = (Feature.PULL, Feature.SPLIT_PULL, Feature.LEASE, Feature.REVOCATION)
OF_EARLIER = (Feature.HOST, Feature.DISK, Feature.WEIGHTS, *OF_PEERS)


class Event(StrEnum):
    """Events of a request."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    MOVE = "move"


class Way(NamedTuple):
    """How a node gets the KV of a request."""

    mode: Mode = Mode.LOCAL
    pull: bool = False  # the peer has the KV; else it computes the prompt
    peer: int = -1
    source: int = -1  # index of the node that the peer pulls from first
    beside: int = 0  # first blocks that are computed while the others are pulled
    ahead: int = 0  # tokens that the peer may decode ahead


@dataclass(eq=False)
class Request:
    """A request of a client. ``todo`` are its events, by step after its arrival."""

    prompt: list[int]
    sampling: SamplingParams
    arrival: int
    todo: list[tuple[int, Event]]
    way: Way
    node: int  # index of the node that serves the request now
    rid: int = 0  # on its node; 0: it has not arrived
    cancelled: bool = False
    weights: int = 0  # changes before it
    met: set[Feature] = field(default_factory=set)


@dataclass(frozen=True)
class Task(Job):
    """A request, or a part of it, at one node."""

    owner: Request | None = None
    peer: int = -1  # index of the node that computes the prompt, or has its KV
    source: int = -1  # index of the node from which the peer pulls first; -1: it does not
    outputs: tuple[tuple[int, list[int]], ...] = ()  # (choice, tokens so far) of choices that continue

    @classmethod
    def of(cls, request: Request, outputs: tuple[tuple[int, list[int]], ...] = ()) -> Task:
        way = request.way
        return cls(
            request.prompt,
            request.sampling,
            way.mode,
            pull=way.pull,
            beside=way.beside,
            ahead=way.ahead,
            owner=request,
            peer=way.peer,
            source=way.source,
            outputs=outputs,
        )

    @cached_property
    def whole(self) -> list[list[int]]:
        sampling = self.sampling
        weights = 0 if self.owner is None else self.owner.weights
        return [reference(self.prompt, choice, sampling.max_tokens, (), weights) for choice in range(sampling.n)]

    @cached_property
    def resume(self) -> dict[int, list[int]]:
        return dict(self.outputs)

    @cached_property
    def expected(self) -> list[list[int]]:
        if not self.resume:
            return self.whole
        return [whole[len(self.resume.get(choice, whole)) :] for choice, whole in enumerate(self.whole)]


class RequestDraws:
    """Draws requests for a world that aims at a cell."""

    def __init__(self, rng: random.Random, aim: Cell) -> None:
        self.requests: list[Request] = []  # all, oldest first
        self.weights = 0  # changes so far
        self._rng = rng
        _, self._feature, self._choices, _ = aim
        self._prefixes = [rng.choices(range(900), k=LONGEST) for _ in range(rng.choice((1, 2, 4)))]

    def draw(self) -> list[Request]:
        """Return requests that meet in the nodes, by the steps of their arrival."""
        sizes = ((12, 150), (16, 200)) if self._feature in OF_EARLIER else ((4, 10), (8, 20), (12, 100))
        count, last_arrival = self._rng.choice(sizes)
        if self._feature is Feature.PREEMPTION:
            last_arrival = 10
        for _ in range(count):
            self.requests.append(self._draw_request(last_arrival))
        return self.requests[-count:]

    def _draw_request(self, last_arrival: int) -> Request:
        rng = self._rng
        aims = rng.random() < 0.6
        feature = self._feature if aims else rng.choice([*Feature])
        n = self._choices if aims else rng.choice(CHOICES)
        arrival = rng.randint(0, last_arrival)
        earlier = None
        node = 0 if feature in AT_HOME and rng.random() < 0.8 else rng.randrange(NODES)
        if self.requests and rng.random() < (0.9 if feature in OF_EARLIER else 0.3):
            earlier = self._draw_earlier(feature)
            arrival = max(arrival, min(earlier.arrival + 15, last_arrival))
        if feature is Feature.REVOCATION and rng.random() < 0.5:
            feature = Feature.PREEMPTION  # it lacks the blocks that other requests pull
            node = 0
            earlier = None
        elif earlier is not None and feature in OF_PEERS:
            node = rng.choice([index for index in range(NODES) if index != earlier.node])
        elif feature in OF_PEERS:
            feature = Feature.PREEMPTION
            node = 0  # others will pull from this node
        way = self.draw_way(node, feature, -1 if earlier is None else earlier.node)
        prompt = self._draw_prompt() if earlier is None else self._continued(earlier)
        sampling = SamplingParams(max_tokens=rng.randint(1, MOST_OUTPUT), n=n)
        request = Request(prompt, sampling, arrival, [], way, node, weights=self.weights)
        for feature, event, chance in (
            (Feature.PAUSE, Event.PAUSE, 0.3),
            (Feature.MIGRATION, Event.MOVE, 0.2),
            (Feature.CANCEL, Event.CANCEL, 0.1),
        ):
            while rng.random() < (0.8 if aims and self._feature is feature else chance):
                at = rng.randint(0, 30)
                request.todo.append((at, event))
                if event is Event.PAUSE:
                    request.todo.append((at + rng.choice((0, 0, 1, 5, 20)), Event.RESUME))
                if event is Event.CANCEL:
                    break
        request.todo.sort(key=lambda event: event[0])
        return request

    def _draw_prompt(self) -> list[int]:
        """Return a prompt that shares a prefix with others. Its length is often that of full blocks."""
        rng = self._rng
        length = rng.randint(1, LONGEST)
        if rng.random() < 0.5:
            length = max(1, BLOCK * (length // BLOCK) + rng.choice((0, 0, 1)))
        own = rng.randint(0, length) if rng.random() < 0.5 else 0
        return rng.choice(self._prefixes)[: length - own] + rng.choices(range(900), k=own)

    def _draw_earlier(self, feature: Feature) -> Request:
        """Return an earlier request: for tiers one of the first, for revocations one of the node that lacks blocks."""
        requests = self.requests
        if feature in (Feature.HOST, Feature.DISK):
            requests = requests[: 1 + len(requests) // 2]
        elif feature is Feature.REVOCATION:
            requests = [request for request in requests if request.node == 0] or requests
        return self._rng.choice(requests)

    def _continued(self, earlier: Request) -> list[int]:
        """Return the prompt of an earlier request again, a part of it, or one that continues its answer."""
        rng = self._rng
        whole = [*earlier.prompt, *Task.of(earlier).whole[0], *rng.choices(range(900), k=rng.randint(0, 5))]
        length = rng.choice((len(earlier.prompt), rng.randint(1, len(whole)), LONGEST))
        return whole[: min(length, LONGEST)]

    def draw_way(self, node: int, feature: Feature, holder: int) -> Way:
        """Return a way to the KV that may meet a feature. ``holder``: a node that may have it; -1: none."""
        rng = self._rng
        others = [index for index in range(NODES) if index != node]
        peer = holder if holder in others else rng.choice(others)
        ahead = rng.choice((0, 0, 2))
        match feature:
            case Feature.HANDOFF:
                return Way(Mode.HANDOFF, peer=rng.choice(others), ahead=ahead)
            case Feature.PULL | Feature.REVOCATION:
                return Way(Mode.HANDOFF, pull=True, peer=peer)
            case Feature.SPLIT_PULL:
                return Way(Mode.HANDOFF, pull=True, peer=peer, beside=rng.choice((1, 2)))
            case Feature.LEASE:
                third = sum(others) - peer
                return Way(Mode.HANDOFF, peer=third, source=peer, ahead=ahead, beside=rng.choice((0, 0, 1, 2)))
            case Feature.HOST | Feature.DISK | Feature.PREEMPTION:
                return Way()
        return rng.choice((Way(), Way(Mode.HANDOFF, peer=peer, ahead=ahead), Way(Mode.HANDOFF, True, peer)))
