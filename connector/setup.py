"""The setup from which a connector back end is built: its rank, the ranks of its node and their timing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.config.simulated_costs import SimulatedCosts
from pdserve.kv.layout import KVShare
from pdserve.kv.states import RankStates
from pdserve.protocols import KVConnector
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming


class ConnectorSetup(msgspec.Struct, frozen=True):
    """One rank of a node whose ranks hold ``shares`` of the KV; no shares: a node of one rank."""

    agent: str = ""  # the rank's name among peers; no other epoch of a node uses it
    timing: PeerTiming = DEFAULT_TIMING
    shares: tuple[KVShare, ...] = ()
    rank: int = 0
    costs: SimulatedCosts | None = None  # cost model of simulated nodes
    states: RankStates | None = None  # None: no recurrent layers


BackEnd = Callable[[ConnectorSetup], KVConnector]
