"""A pull ends once, in one way, and its prompt goes on whatever happens to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.reading.pull_driver import Pull, PullDriver
from node.reading.reading_metrics import ReadingMetrics
from pdserve.errors import PdserveError, PeerError
from pdserve.ipc.messages import ComputeBeside, KVConfirmed, ReadEnded, Reserved, StartRead
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.request_cost import NO_PULL, LoadPlan, StepCosts
from pdserve.rpc.timeouts import DEFAULT_TIMING

RID = 3
NUMBER = 9  # the pull's, on the stream to the source


class Nodes:
    """This node with its engine and configuration, and the connected source with its stream."""

    def __init__(self, connected: bool = True) -> None:
        self.address = "source:1"
        self.stream = self if connected else None
        self.peer = Peer("source", "epoch", ())
        self.sent: list[Any] = []  # to the source
        self.orders: list[Any] = []  # to this node's engine
        self.checks = 0
        self.engine = _Engine(self.orders)
        self.config = self
        self.options = self
        self.peer_timing = DEFAULT_TIMING
        self.metrics = ReadingMetrics()
        self.costs = StepCosts()

    def kv_layers_with(self, other_drafts: bool) -> int:
        return 5

    def prefill(self, request: pb.PrefillRequest, handler: Any) -> int:
        self.sent.append(request)
        return NUMBER

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def forget(self, number: int) -> None:
        assert number == NUMBER

    def check(self) -> None:
        self.checks += 1


class _Engine:
    def __init__(self, orders: list[Any]) -> None:
        self.send = orders.append


class Prompt:
    """A PulledPrompt of eight tokens that records what happens to it."""

    rid = RID
    request_id = "r"
    num_tokens = 8

    def __init__(self, pull: Pull | None, *, faulty: bool = False) -> None:
        self.history: list[object] = []
        self._pull = pull
        self._faulty = faulty

    def plan(self, cached_tokens: int) -> Pull | None:
        return self._pull

    def decline(self) -> None:
        self.history.append("declined")

    def ask(self, source: Peer) -> pb.PrefillRequest:
        if self._faulty:
            raise ZeroDivisionError
        return pb.PrefillRequest(request_id=self.request_id)

    def on_asked(self) -> None:
        self.history.append("asked")

    def on_read_started(self) -> None:
        self.history.append("read started")

    def on_read_ended(self, read: ReadResult) -> None:
        self.history.append("read ended")

    def on_confirmed(self, confirmed: KVConfirmed, num_tokens: int) -> None:
        self.history.append(num_tokens)

    def on_failed(self, error: PdserveError) -> None:
        self.history.append(error)

    def on_abandoned(self) -> None:
        self.history.append("abandoned")


WHOLE = Pull(NO_PULL, float("inf"))
PART = pb.PrefillEvent(kv_ready=pb.KVReady(lease_ms=3000, block_ids=[1], num_tokens=6))
FINISHED = pb.PrefillEvent(finished=pb.Finished())
STOOD = pb.PrefillEvent(released=pb.Released(stood=True))


def driver_of(nodes: Any, prompt: Prompt) -> PullDriver:
    return PullDriver(nodes, nodes, nodes, prompt)


def play(nodes: Nodes, prompt: Prompt, *events: Any) -> PullDriver:
    """Reserve blocks of a prompt with two cached tokens, then let the events come."""

    async def run() -> PullDriver:
        driver = driver_of(nodes, prompt)
        driver.on_engine_event(Reserved(RID, 2))
        for event in events:
            driver.on_event(event)
        return driver

    return asyncio.run(run())


def test_pull_brings_what_the_source_has() -> None:
    nodes = Nodes()
    prompt = Prompt(WHOLE)
    play(nodes, prompt, PART, FINISHED, ReadEnded(RID, "epoch", ReadResult(1)), STOOD)
    request, release = nodes.sent
    assert (request.skip_tokens, request.kv_layers, request.cached_only) == (2, 5, True)
    assert release == pb.ReleaseRequest(request=NUMBER)
    assert [type(order) for order in nodes.orders] == [StartRead]
    assert prompt.history == ["asked", "read started", "read ended", 4]


def test_split_computes_tokens_before_those_that_are_pulled() -> None:
    nodes = Nodes()
    prompt = Prompt(Pull(LoadPlan(2, 4, 0.1), float("inf")))
    play(nodes, prompt, PART, FINISHED, ReadEnded(RID, "epoch", ReadResult(1)), STOOD)
    assert nodes.orders[0] == ComputeBeside(RID, 4)
    assert nodes.sent[0].skip_tokens == 4
    assert prompt.history[-1] == 2


def test_pull_that_is_not_worth_its_time_asks_no_source() -> None:
    nodes = Nodes()
    prompt = Prompt(None)
    play(nodes, prompt, FINISHED)
    assert (nodes.sent, nodes.orders, prompt.history) == ([], [], ["declined"])


def test_lost_source_fails_the_pull() -> None:
    nodes = Nodes(connected=False)
    prompt = Prompt(WHOLE)
    play(nodes, prompt)
    (error,) = prompt.history
    assert isinstance(error, PeerError)
    assert "was lost" in str(error)
    assert nodes.checks == 1


@pytest.mark.parametrize("tokens", ["first_tokens", "next_token"])
def test_source_that_sends_tokens_is_not_believed(tokens: str) -> None:
    nodes = Nodes()
    prompt = Prompt(WHOLE)
    event = pb.PrefillEvent(request=NUMBER)
    getattr(event, tokens).SetInParent()
    play(nodes, prompt, PART, event, FINISHED, STOOD)
    assert nodes.sent[1:] == [pb.ReleaseRequest(request=NUMBER)]
    assert isinstance(prompt.history[-1], PeerError)


def test_bug_fails_the_pull_and_not_the_prompt() -> None:
    nodes = Nodes()
    prompt = Prompt(WHOLE, faulty=True)
    play(nodes, prompt)
    (error,) = prompt.history
    assert isinstance(error, PeerError)
    assert "the pull failed" in str(error)


def test_abandoned_pull_releases_its_lease_and_ends() -> None:
    nodes = Nodes()
    prompt = Prompt(WHOLE)

    async def run() -> None:
        driver = driver_of(nodes, prompt)
        driver.on_engine_event(Reserved(RID, 2))
        driver.on_event(PART)
        driver.abandon()
        driver.abandon()
        driver.on_event(FINISHED)

    asyncio.run(run())
    assert nodes.sent[1:] == [pb.ReleaseRequest(request=NUMBER)]
    assert prompt.history == ["asked", "read started", "abandoned"]
