"""Worker side of the KV connector, and its choice of back end. The scheduler side is in engine/kv_cache/.

``build`` returns a connector back end of one of these kinds, all with the Protocol ``pdserve.protocols.KVConnector``:

    nixl        one-sided reads over UCX, between processes and hosts     backends/nixl/
    local       copies within one process, for tests                      backends/local.py
    simulated   moves nothing, takes the time of a cost model             backends/simulated.py
    none        no peers                                                  backends/null.py

NIXL is imported when a connector is registered, not before.
"""

from __future__ import annotations

from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.errors import ConfigError
from pdserve.kv import KVShare
from pdserve.protocols import KVConnector, WeightReader, WeightSource
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming
from pdserve.weight_sharing import OfferedMemory, WeightPeer

KINDS = ("nixl", "local", "simulated", "none")


def build(
    kind: str,
    agent: str,
    timing: PeerTiming = DEFAULT_TIMING,
    shares: tuple[KVShare, ...] = (),
    rank: int = 0,
    costs: SimulatedCosts | None = None,
) -> KVConnector:
    """Build the connector of rank ``rank`` of a node whose ranks hold ``shares``; no shares: a node of one rank.

    Peers know it as ``agent``, a name that no other epoch of a node uses. ``costs`` are for simulated reads. Raises
    ConfigError for an unknown kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"connector {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "simulated":
        from connector.backends.simulated import SimulatedConnector

        return SimulatedConnector(agent, costs or SimulatedCosts())
    from connector.planning.rank_mapping import LocalRank

    local_rank = LocalRank(shares, rank)
    if kind == "nixl":
        from connector.backends.nixl.nixl_connector import NixlConnector

        return NixlConnector(agent, timing, local_rank)
    if kind == "local":
        from connector.backends.local import LocalConnector

        return LocalConnector(agent, local_rank)
    from connector.backends.null import NullConnector

    return NullConnector(agent, local_rank)


def offer_weights(memory: OfferedMemory, timing: PeerTiming = DEFAULT_TIMING) -> WeightSource:
    """Register a rank's tensors so that peers can read them. Raises ConfigError or CapacityError."""
    from connector.backends.nixl.weight_transfer import NixlWeightSource

    return NixlWeightSource(memory, timing)


def weight_reader(peer: WeightPeer, timing: PeerTiming = DEFAULT_TIMING) -> WeightReader:
    """Return the reader of a peer's tensors; it connects at its first read."""
    from connector.backends.nixl.weight_transfer import NixlWeightReader

    return NixlWeightReader(peer, timing)
