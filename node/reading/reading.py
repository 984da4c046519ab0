"""The part of a node that reads KV from peers: its connections and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric

from node.context import NodeContext
from node.reading.peers import KVPeers
from node.reading.read_settings import ReadSettings
from node.reading.reading_metrics import ReadingMetrics


class Reading:
    """``prefill`` are the sources of nodes that also compute prompts for this one."""

    def __init__(self, settings: ReadSettings, prefill: Sequence[str] = ()) -> None:
        self.reads = bool(prefill or settings.kv_source)
        self._settings = settings
        self._prefill = tuple(prefill)
        self._metrics = ReadingMetrics()
        self._peers: KVPeers | None = None

    def attach(self, node: NodeContext) -> KVPeers:
        """Raises ConfigError for a source that this machine cannot query."""
        self._peers = KVPeers(
            node,
            self._metrics,
            prefill=self._prefill,
            others=self._settings.kv_source,
            required_transport=self._settings.require_transport,
        )
        return self._peers

    async def connect(self, seconds: float) -> None:
        """Connect, and wait for a first prefill node for at most ``seconds``."""
        if self._peers is not None:
            await self._peers.start(seconds)

    def drop(self, reason: str) -> None:
        if self._peers is not None:
            self._peers.drop(reason)

    def connected_ids(self) -> Sequence[str]:
        return self._peers.connected_ids() if self._peers is not None else ()

    def metrics(self) -> Iterable[Metric]:
        return self._metrics.collect()

    async def close(self) -> None:
        if self._peers is not None:
            await self._peers.close()
