"""Running streams move between scripted nodes of both roles."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from running_request import RunningRequest
from scripted_node import Conversation, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import unpack_tokens
from router.fleet.fleet import Fleet
from router.fleet.moves import Move
from router.fleet.nodes import Nodes
from router.fleet.stream_mover import StreamMover
from router.metrics import RouterMetrics

MODEL = "small"
SALT = "s"


@pytest.fixture
def pair() -> Iterator[list[ScriptedNode]]:
    nodes = [ScriptedNode(MODEL, node_id=name) for name in ("a", "b")]
    for node, peer in zip(nodes, ("b", "a"), strict=True):
        node.description.role = "both"
        node.description.connected_peers.append(peer)
    yield nodes
    for node in nodes:
        node.close()


@asynccontextmanager
async def served(pair: list[ScriptedNode]) -> AsyncIterator[tuple[Fleet, Nodes, RouterMetrics]]:
    nodes = Nodes({}, {MODEL})
    metrics = RouterMetrics()
    fleet = Fleet(MODEL, nodes, "least-loaded", metrics)
    nodes.listed("both", frozenset(node.address for node in pair))
    try:
        await nodes.wait_until(lambda: nodes.complete and len(nodes.views()) == 2)
        yield fleet, nodes, metrics
    finally:
        await nodes.close()


def ends(fleet: Fleet, nodes: Nodes) -> tuple[str, str]:
    """Return the node of the only stream that may move, and the other one."""
    (source,) = (view.node_id for view in nodes.views() if fleet.movable(view.node_id))
    return source, "b" if source == "a" else "a"


def moved(metrics: RouterMetrics, reason: str = "moved") -> float:
    return float(metrics.migrations.labels(reason)._value.get())


@pytest.mark.parametrize("refusing", [False, True])
def test_a_stream_goes_on_where_it_moves_or_where_it_was(pair: list[ScriptedNode], refusing: bool) -> None:
    """The stream moves after the next token. The new node continues from there, unless it refuses."""
    resumed: list[tuple[str, str, list[int]]] = []
    is_moving = threading.Event()

    def play(name: str) -> None:
        async def script(conversation: Conversation) -> None:
            message = conversation.message
            if not message.resume:
                conversation.token(1)
                await asyncio.to_thread(is_moving.wait)
                conversation.token(2)
                await conversation.cancelled.wait()
                conversation.token(9)  # from a step in flight
                return
            resumed.append((name, message.prefill_node, list(unpack_tokens(message.resume[0].token_ids))))
            if refusing and len(resumed) == 1:
                conversation.fail(pb.Failure.OVERLOADED)
                return
            conversation.token(3)
            conversation.token(4, finish="length")

        pair["ab".index(name)].scripts[SALT] = script

    play("a")
    play("b")

    async def run() -> None:
        async with served(pair) as (fleet, nodes, metrics):
            request = RunningRequest([5] * 40, 100, fleet, metrics, SALT)
            await request.start()
            await request.wait(1)
            source, target = ends(fleet, nodes)
            mover = StreamMover(fleet, lambda snapshot: [Move(source, target, 1)])
            await mover.move_streams()
            await mover.move_streams()  # the stream is about to leave: a second call changes nothing
            assert not resumed
            is_moving.set()
            assert await request.wait() == [1, 2, 3, 4]
            attempts = [(target, source, [1, 2])]
            assert resumed[:1] == attempts
            assert [(name, tokens) for name, _, tokens in resumed[1:]] == [(source, [1, 2])] * refusing
            assert (moved(metrics), moved(metrics, "failed"), moved(metrics, "lost")) == (1, 0, 0)
            assert all(view.in_flight == 0 for view in nodes.views())

    asyncio.run(run())


def test_a_stream_that_has_just_moved_or_is_about_to_end_stays(pair: list[ScriptedNode]) -> None:
    is_moving = threading.Event()

    async def script(conversation: Conversation) -> None:
        conversation.token(1)
        await asyncio.to_thread(is_moving.wait)
        conversation.token(1)
        await conversation.cancelled.wait()

    for node in pair:
        node.scripts[SALT] = script

    async def run() -> None:
        async with served(pair) as (fleet, nodes, metrics):
            short, long = (RunningRequest([5] * 40, length, fleet, metrics, SALT) for length in (5, 100))
            for request in (short, long):
                await request.start()
                await request.wait(1)
            source, target = ends(fleet, nodes)
            await StreamMover(fleet, lambda snapshot: [Move(source, target, 9)]).move_streams()
            is_moving.set()
            await long.wait(4)  # two tokens of each node
            await StreamMover(fleet, lambda snapshot: [Move(target, source, 9)]).move_streams()
            assert moved(metrics) == 1

    asyncio.run(run())


def test_a_stream_whose_node_fails_before_it_has_moved_does_not_move_later(pair: list[ScriptedNode]) -> None:
    is_moving = threading.Event()

    async def script(conversation: Conversation) -> None:
        if conversation.message.resume:
            conversation.token(2)
            conversation.token(3, finish="length")
            return
        conversation.token(1)
        await asyncio.to_thread(is_moving.wait)
        conversation.fail(pb.Failure.NODE_FAILED)

    for node in pair:
        node.scripts[SALT] = script

    async def run() -> None:
        async with served(pair) as (fleet, nodes, metrics):
            request = RunningRequest([5] * 40, 100, fleet, metrics, SALT)
            await request.start()
            await request.wait(1)
            source, target = ends(fleet, nodes)
            await StreamMover(fleet, lambda snapshot: [Move(source, target, 1)]).move_streams()
            is_moving.set()
            assert await request.wait() == [1, 2, 3]
            assert (moved(metrics), moved(metrics, "failed")) == (0, 1)

    asyncio.run(run())
