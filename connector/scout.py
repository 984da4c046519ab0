"""Trying out a peer before the agent that carries the traffic connects to it.

Connecting to a host that does not answer blocks for seconds, and NIXL holds the lock of the agent's UCX worker all
that time: reads from every other peer would stand still. A second agent, with a thread of its own, takes that wait.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from connector.nixl import Agent
from pdserve.errors import PdserveError, PeerError
from pdserve.records import Peer, RankKV
from pdserve.timing import PeerTiming

logger = logging.getLogger(__name__)

Report = Callable[[Peer, RankKV, str], None]  # the reason it failed, or ""


class Scout:
    """Connects to peers one after the other and reports; lets go of each connection at once."""

    def __init__(self, name: str, timing: PeerTiming, report: Report) -> None:
        self._name = name
        self._timing = timing
        self._report = report
        self._orders: queue.SimpleQueue[tuple[Peer, RankKV] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-scout-{name}", daemon=True)
        self._thread.start()

    def visit(self, peer: Peer, rank: RankKV) -> None:
        """Order a visit; ``report`` is called from the scout's thread."""
        self._orders.put((peer, rank))

    def close(self, timeout: float) -> None:
        """Stop, waiting at most ``timeout`` seconds for a visit under way."""
        self._orders.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        agent: Agent | None = None
        while (order := self._orders.get()) is not None:
            peer, rank = order
            try:
                agent = agent or Agent(f"{self._name}/scout", self._timing)
                _visit(agent, rank)
            except PdserveError as error:
                self._report(peer, rank, str(error))
            else:
                self._report(peer, rank, "")
        if agent is not None:
            agent.close()


def _visit(agent: Agent, rank: RankKV) -> None:
    name = agent.add(rank.metadata)
    agent.remove(name)
    if name != rank.agent:
        raise PeerError(f"the peer says it is {rank.agent}, its NIXL metadata is of {name}")
