"""The connector of a node that exchanges no KV."""

from __future__ import annotations

from collections.abc import Callable

from connector.completion_queue import CompletionQueue
from connector.planning.rank_mapping import LocalRank
from connector.setup import ConnectorSetup
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.records import KVConnectorOutput, KVRead, Peer, RankKV


class NullConnector:
    """Connections and reads fail; all other calls do nothing."""

    def __init__(self, setup: ConnectorSetup) -> None:
        self._agent = setup.agent
        self._local_rank = LocalRank(setup.shares, setup.rank, setup.states)
        self._completions = CompletionQueue()

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        self._completions.on_progress = on_progress
        return RankKV(self._agent, b"", region, layout, self._local_rank.share, self._local_rank.states)

    def connect(self, peer: Peer) -> None:
        self._completions.peer_failed(peer.epoch, "this node was started without a KV connector")

    def disconnect(self, epoch: str) -> None:
        pass

    def read(self, read: KVRead) -> None:
        self._completions.read_refused(read, "this node was started without a KV connector")

    def poll(self) -> KVConnectorOutput:
        return self._completions.drain()

    def close(self) -> None:
        pass
