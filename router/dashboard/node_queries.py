"""Nodes are asked for what only they know, while somebody looks: once a second, for all who look together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc.aio

from router.dashboard.node_rates import Answers, Exposed, read_answer
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes

PATIENCE = 5.0  # seconds after which somebody who has not asked again has gone
_PERIOD = 1.0  # seconds
_MOST = 64  # nodes that are asked in a period; of more, each has its turn less often
_AT_ONCE = 8  # calls: their answers must not hold up tokens for long
_TIMEOUT = 1.0  # seconds a node has to answer

Key = tuple[str, str]  # role and address of a node


class NodeQueries:
    """``answers`` are those of nodes that have been asked lately; none while nobody looks."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._wanted_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._turn = 0
        self._places = asyncio.Semaphore(_AT_ONCE)
        self.answers: Mapping[Key, Answers] = {}
        self.exposed = Exposed()

    def look(self) -> None:
        """Somebody does, at this moment."""
        self._wanted_until = asyncio.get_running_loop().time() + PATIENCE
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="dashboard")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while (began := loop.time()) < self._wanted_until:
            await self._round()
            await asyncio.sleep(began + _PERIOD - loop.time())
        self.answers, self.exposed = {}, Exposed()

    async def _round(self) -> None:
        """Ask those whose turn it is."""
        alive = {(node.role, node.address): node for node in self._nodes if node.description is not None}
        self.answers = {key: self.answers.get(key) or Answers() for key in alive}
        keys = sorted(alive)
        start = self._turn % len(keys) if len(keys) > _MOST else 0
        self._turn = start + _MOST
        chosen = [*keys[start:], *keys[:start]][:_MOST]
        await asyncio.gather(*(self._ask(alive[key], self.answers[key]) for key in chosen))

    async def _ask(self, node: NodeClient, answers: Answers) -> None:
        async with self._places:
            if node.description is None:
                return
            epoch = node.description.epoch
            try:
                status = await node.status(_TIMEOUT)
            except grpc.aio.AioRpcError:
                return  # whether it is lost is for Watch to say
            at = asyncio.get_running_loop().time()
            self.exposed.add(at, answers.add(read_answer(at, epoch, status)))
