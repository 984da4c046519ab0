"""Connection probe: try a new peer on a separate agent and thread before the traffic's agent connects to it.

Connecting to an unresponsive host blocks for seconds, and NIXL holds the lock of the agent's UCX worker all that time:
reads from all other peers would stand still.

Each rank of a peer is probed by an agent of its own: UCX logs the lanes of a connection only if they are the first such
lanes of its worker. The traffic's agent gets the same lanes: both run in one process with one configuration.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import NixlAgent
from connector.planning.rank_mapping import SourceRank, naming_rank
from pdserve.errors import PdserveError, PeerError
from pdserve.records import Peer, RankKV
from pdserve.rpc.timeouts import PeerTiming

Sources = tuple[SourceRank, ...]
Lanes = tuple[str, ...]  # UCX's, by source; "" if unknown
OnProbed = Callable[[Peer, Sources, Lanes, str], None]  # the last is the reason of a failure, or ""

_LINGER_SECONDS = 1.0  # the peer connects back meanwhile; without an agent it would log a warning

_numbers = itertools.count()  # unique in the process, as UCX's log is


class ConnectionProbe:
    """Connects to peers one after the other, reports each, and closes the connection at once."""

    def __init__(self, name: str, timing: PeerTiming, on_probed: OnProbed) -> None:
        self._name = name
        self._timing = timing
        self._on_probed = on_probed
        self._peers: queue.SimpleQueue[tuple[Peer, Sources] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-probe-{name}", daemon=True)
        self._thread.start()

    def probe(self, peer: Peer, sources: Sources) -> None:
        """Queue a probe of these ranks of a peer; the probe's thread calls ``on_probed`` once."""
        self._peers.put((peer, sources))

    def close(self, timeout: float) -> None:
        """Stop, waiting at most ``timeout`` seconds for a probe under way."""
        self._peers.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        agents: list[NixlAgent] = []
        while (order := self._next_order(agents)) is not None:
            peer, sources = order
            try:
                lanes = tuple(self._connect(peer, source.rank, agents) for source in sources)
            except PdserveError as error:
                self._on_probed(peer, sources, (), str(error))
            else:
                self._on_probed(peer, sources, lanes, "")
        _close(agents)

    def _next_order(self, agents: list[NixlAgent]) -> tuple[Peer, Sources] | None:
        try:
            return self._peers.get(timeout=_LINGER_SECONDS if agents else None)
        except queue.Empty:
            _close(agents)
            return self._peers.get()

    def _connect(self, peer: Peer, rank: RankKV, agents: list[NixlAgent]) -> str:
        """Connect to a rank and return the lanes. The agent is added to ``agents``."""
        worker = f"probe-{next(_numbers)} "  # a prefix: UCX cuts names off at 31 characters
        agents.append(NixlAgent(worker + self._name, self._timing))
        with naming_rank(peer, rank):
            try:
                agent = agents[-1].add(rank.metadata)
                agents[-1].remove(agent)
            finally:
                lanes = ucx.log().take_lanes(worker)
            if agent != rank.agent:
                raise PeerError(f"the peer says it is {rank.agent}, its NIXL metadata is of {agent}")
        return lanes


def _close(agents: list[NixlAgent]) -> None:
    while agents:
        agents.pop().close()
