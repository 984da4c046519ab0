"""Trying out a peer before the agent that carries the traffic connects to it.

Connecting to a host that does not answer blocks for seconds, and NIXL holds the lock of the agent's UCX worker all
that time: reads from every other peer would stand still. An agent of its own, on a thread of its own, takes that wait.

It is another agent for every rank of a peer, since UCX names the lanes of a connection only where it is the worker's
first one with these lanes. The traffic's agent will get the same: both run in one process with one configuration.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.planning.rank_mapping import SourceRank, naming_rank
from pdserve.errors import PdserveError, PeerError
from pdserve.records import Peer, RankKV
from pdserve.rpc.timeouts import PeerTiming

logger = logging.getLogger(__name__)

Sources = tuple[SourceRank, ...]
Lanes = tuple[str, ...]  # UCX's, by source; "" where unknown
Report = Callable[[Peer, Sources, Lanes, str], None]  # the last is the reason it failed, or ""

_LINGER_SECONDS = 1.0  # the peer connects back meanwhile; if it found nobody there, it would log a warning

_numbers = itertools.count()  # within the process, as is UCX's log


class ConnectionProbe:
    """Connects to peers one after the other and reports; lets go of each connection at once."""

    def __init__(self, name: str, timing: PeerTiming, report: Report) -> None:
        self._name = name
        self._timing = timing
        self._report = report
        self._orders: queue.SimpleQueue[tuple[Peer, Sources] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-scout-{name}", daemon=True)
        self._thread.start()

    def visit(self, peer: Peer, sources: Sources) -> None:
        """Order a visit to these ranks of a peer; ``report`` is called from the scout's thread, once."""
        self._orders.put((peer, sources))

    def close(self, timeout: float) -> None:
        """Stop, waiting at most ``timeout`` seconds for a visit under way."""
        self._orders.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        agents: list[NixlAgent] = []
        while (order := self._next_order(agents)) is not None:
            peer, sources = order
            try:
                lanes = tuple(self._visit(peer, source.rank, agents) for source in sources)
            except PdserveError as error:
                self._report(peer, sources, (), str(error))
            else:
                self._report(peer, sources, lanes, "")
        _close(agents)

    def _next_order(self, agents: list[NixlAgent]) -> tuple[Peer, Sources] | None:
        try:
            return self._orders.get(timeout=_LINGER_SECONDS if agents else None)
        except queue.Empty:
            _close(agents)
            return self._orders.get()

    def _visit(self, peer: Peer, rank: RankKV, agents: list[NixlAgent]) -> str:
        """The lanes of a connection to that rank. The agent that made it is added to ``agents``."""
        worker = f"scout-{next(_numbers)} "  # in front: UCX cuts names off at 31 characters
        agents.append(NixlAgent(worker + self._name, self._timing))
        with naming_rank(peer, rank):
            try:
                found = agents[-1].add(rank.metadata)
                agents[-1].remove(found)
            finally:
                lanes = ucx.log().take_lanes(worker)
            if found != rank.agent:
                raise PeerError(f"the peer says it is {rank.agent}, its NIXL metadata is of {found}")
        return lanes


def _close(agents: list[NixlAgent]) -> None:
    while agents:
        agents.pop().close()
