"""Worker side of the KV connector: it moves blocks between the KV caches of two nodes and says when they have arrived.

``build`` gives one of four connectors, all with the Protocol ``pdserve.protocols.KVConnector``:

    nixl    one-sided reads over UCX, between processes and machines        worker.py, connection.py, link.py, nixl.py
    local   copies within this process: tests, colocated nodes              local.py
    simulated    nothing is moved, but takes its time                       simulated.py
    none    no peers, for a node that exchanges nothing                     null.py

Imports of NIXL happen when a connector is registered, not before.
"""

from __future__ import annotations

from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.errors import ConfigError
from pdserve.kv import KVShare
from pdserve.protocols import KVConnector
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

KINDS = ("nixl", "local", "simulated", "none")


def build(
    kind: str,
    agent: str,
    timing: PeerTiming = DEFAULT_TIMING,
    shares: tuple[KVShare, ...] = (),
    rank: int = 0,
    costs: SimulatedCosts | None = None,
) -> KVConnector:
    """A connector of ``kind`` that is known to its peers as ``agent``, a name that no other life of a node ever uses.

    It is that of rank number ``rank`` of a node whose ranks hold ``shares``; without, of a node of one rank. Each rank
    has an agent of its own, and reads by itself what it holds, from whichever ranks of a peer have it. Raises
    ConfigError for an unknown kind. ``costs`` are those of simulated reads.
    """
    if kind not in KINDS:
        raise ConfigError(f"connector {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "simulated":
        from connector.backends.simulated import SimulatedConnector

        return SimulatedConnector(agent, costs or SimulatedCosts())
    from connector.planning.rank_mapping import LocalRank

    own = LocalRank(shares, rank)
    if kind == "nixl":
        from connector.backends.nixl.nixl_connector import NixlConnector

        return NixlConnector(agent, timing, own)
    if kind == "local":
        from connector.backends.local import LocalConnector

        return LocalConnector(agent, own)
    from connector.backends.null import NullConnector

    return NullConnector(agent, own)
