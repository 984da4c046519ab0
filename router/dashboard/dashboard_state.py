"""The state of a router and its fleet, sampled once a second."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec
from prometheus_client import metrics as prometheus
from prometheus_client.registry import Collector

from pdserve import __version__
from router.dashboard import live
from router.dashboard.node_rates import Reader, live_reads
from router.dashboard.status_poller import Key, StatusPoller
from router.dashboard.traffic_log import TrafficLog, TrafficSample
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes
from router.fleet.policy import BOTH, NodeView
from router.metrics import RouterMetrics

_MAX_CONNECTIONS = 50  # connections in a report
_VERSION = __version__


class DashboardState:
    """Samples each second after ``start``, and polls nodes while ``report`` is called."""

    def __init__(self, metrics: RouterMetrics, nodes: Nodes, models: Collection[str]) -> None:
        self._metrics = metrics
        self._nodes = nodes
        self._models = models
        self._poller = StatusPoller(nodes)
        self._traffic = TrafficLog(metrics.ttft.fine_bounds, metrics.itl.fine_bounds)
        self._epoch = secrets.token_hex(4)
        self._last_seen: dict[Key, tuple[float, str, str]] = {}  # time of last contact, node id, model
        self._reads: tuple[live.LiveHandoffs | None, list[live.LiveConnection]] = None, []  # at the latest sample
        self._now: tuple[int, live.LiveNow] | None = None  # second and its statistics, shared by all viewers
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sample(0)
        self._task = asyncio.create_task(self._run(), name="dashboard samples")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._poller.close()

    def report(self, epoch: str = "", second: int = -1) -> bytes:
        """Encode a LiveReport for a viewer with the history of ``epoch`` up to ``second``."""
        self._poller.on_view()
        if self._now is None or self._now[0] != self._traffic.second:
            self._now = self._traffic.second, self._live_now()
        history = self._traffic.history(second if epoch == self._epoch else -1)
        return msgspec.json.encode(live.LiveReport(self._epoch, self._now[1], history))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            second = int(loop.time() - started) + 1
            await asyncio.sleep(started + second - loop.time())
            self._sample(second)

    def _sample(self, second: int) -> None:
        metrics = self._metrics
        now = asyncio.get_running_loop().time()
        waiting = int(_value(metrics.waiting))
        views = [view for view in self._nodes.views() if view.ready and view.model in self._models]
        self._reads = self._live_reads()
        handoffs = self._reads[0]
        sample = TrafficSample(
            at=now,
            running=int(_value(metrics.in_flight)) - waiting,
            waiting=waiting,
            outcomes=_outcomes(metrics.requests),
            prompt_tokens=int(_value(metrics.prompt_tokens)),
            cached_tokens=int(_value(metrics.cached_tokens)),
            ttft=tuple(metrics.ttft.counts),
            itl=tuple(metrics.itl.counts),
            kv_prefill=_kv_share(view for view in views if view.prefills),
            kv_decode=_kv_share(view for view in views if view.decodes),
            handoff_p50=handoffs.exposed.p50 if handoffs else None,
            handoff_p99=handoffs.exposed.p99 if handoffs else None,
            kv_read_rate=handoffs.byte_rate if handoffs else None,
        )
        self._traffic.add(second, sample)
        listed = {(node.role, node.address): node for node in self._nodes}
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if key in listed}
        for key, node in listed.items():
            if node.description is not None:
                self._last_seen[key] = now, node.description.node_id, node.description.model

    def _live_now(self) -> live.LiveNow:
        nodes = [self._live_node(node) for node in self._nodes]
        nodes.sort(key=lambda node: (node.role != "prefill", node.state == "ready", node.name, node.address))
        handoffs, connections = self._reads
        return live.LiveNow(
            version=_VERSION,
            models=[self._live_model(name, nodes) for name in self._models],
            traffic=self._traffic.traffic(),
            nodes=nodes,
            handoffs=handoffs,
            connections=connections[:_MAX_CONNECTIONS],
            num_connections=len(connections),
            num_connected=sum(connection.transport != "none" for connection in connections),
        )

    def _live_reads(self) -> tuple[live.LiveHandoffs | None, list[live.LiveConnection]]:
        names = {address: name or address for (_, address), (_, name, _) in self._last_seen.items()}
        readers = [
            Reader(key[0], self._last_seen.get(key, (0.0, key[1], ""))[1], history)
            for key, history in self._poller.histories.items()
            if history.has_rates
        ]
        return live_reads(readers, names, self._poller.exposed.quantiles())

    def _live_model(self, name: str, nodes: list[live.LiveNode]) -> live.LiveModel:
        used = [node for node in nodes if node.model == name and node.state != "unused"]
        total = Counter(node.role for node in used)
        ready = Counter(node.role for node in used if node.state == "ready")
        served = any(view.serves and view.model == name for view in self._nodes.views())
        counts = (ready["prefill"], total["prefill"], ready["decode"], total["decode"])
        return live.LiveModel(name, *counts, served, ready[BOTH], total[BOTH])

    def _live_node(self, node: NodeClient) -> live.LiveNode:
        key = node.role, node.address
        view = node.view()
        description = node.description
        if view is None or description is None:
            if key not in self._last_seen:
                return live.LiveNode("", node.role, node.address, "", "faulty" if node.fault else "unreachable")
            at, name, model = self._last_seen[key]
            lost_seconds = max(0.0, asyncio.get_running_loop().time() - at)
            state = "faulty" if node.fault else "lost"
            return live.LiveNode(name, node.role, node.address, model, state, lost_seconds=lost_seconds)
        used = view.model in self._models and description.role == node.role
        history = self._poller.histories.get(key)
        load = node.reported
        has_step = view.decodes and bool(view.costs.decode)
        return live.LiveNode(
            name=view.node_id,
            role=node.role,
            address=node.address,
            model=view.model,
            state=description.state if used else "unused",
            running=load.running,
            waiting=load.waiting,
            backlog_tokens=load.backlog,
            backlog_seconds=view.costs.prompt.at(load.backlog) if load.backlog else 0.0,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            step_seconds=view.costs.decode.at(max(1, load.running)) if has_step else None,
            stats=history.stats() if history is not None and history.has_rates else None,
        )


def _kv_share(views: Iterable[NodeView]) -> float | None:
    loads = [view.load for view in views]
    total = sum(load.total_blocks for load in loads)
    return 1 - sum(load.free_blocks for load in loads) / total if total else None


def _value(metric: Collector) -> float:
    return float(next(sample.value for family in metric.collect() for sample in family.samples))


def _outcomes(requests: prometheus.Counter) -> Counter[str]:
    """Finished requests by outcome, over all endpoints."""
    outcomes: Counter[str] = Counter()
    for family in requests.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                outcomes[sample.labels["outcome"]] += int(sample.value)
    return outcomes
