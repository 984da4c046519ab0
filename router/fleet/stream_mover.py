"""Moves running streams to nodes that can read their KV, as router/fleet/moves.py decides twice per second.

Streams with the least KV move first: their pauses are the shortest, and most of them have the longest rest before them.
Streams of one node follow each other at a distance, so that each pauses only as long as a single handoff.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from router.fleet.fleet import Fleet
from router.fleet.moves import Move, moves
from router.fleet.policy import BOTH, FleetSnapshot, Placement

logger = logging.getLogger(__name__)

MOVE_INTERVAL = 0.5  # seconds between two decisions
MOVE_DISTANCE = 0.03  # seconds between two streams of one node
MOST_STREAMS = 32  # streams of one node per decision


class StreamMover:
    """Moves the streams of one router for one model. Starts with ``start``."""

    def __init__(self, fleet: Fleet, decide: Callable[[FleetSnapshot], Iterable[Move]] = moves) -> None:
        self._fleet = fleet
        self._decide = decide
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="moves of streams")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(MOVE_INTERVAL)
            try:
                await self.move_streams()
            except Exception:  # a bug here must not end all later moves
                logger.exception("streams could not be moved")

    async def move_streams(self) -> None:
        """Carry out one decision of the policy."""
        snapshot = self._fleet.snapshot()
        if not any(node.role == BOTH for node in snapshot.nodes):
            return
        pending = [
            (
                Placement(move.target, move.source),
                deque(self._fleet.movable(move.source)[: min(move.streams, MOST_STREAMS)]),
            )
            for move in self._decide(snapshot)
        ]
        while pending := [(placement, streams) for placement, streams in pending if streams]:
            for placement, streams in pending:
                streams.popleft().move(placement)
            await asyncio.sleep(MOVE_DISTANCE)
