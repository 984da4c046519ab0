"""What there is to see of a router and its fleet, once a second."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection, Iterable
from importlib.metadata import version

import msgspec
from prometheus_client import metrics as prometheus

from pdserve import live
from router.dashboard.node_queries import Key, NodeQueries
from router.dashboard.node_rates import handoffs_of
from router.dashboard.traffic_log import TrafficLog, TrafficSample
from router.fleet.node_client import NodeClient
from router.fleet.nodes import Nodes
from router.fleet.policy import NodeView
from router.metrics import RouterMetrics

_LINKS = 50  # that are told of
_VERSION = version("pdserve")


class _Report(msgspec.Struct):
    """A ``live.Report`` of which a part is JSON already."""

    life: str
    now: msgspec.Raw
    history: live.LiveHistory


class DashboardState:
    """Samples each second from ``start`` on, and asks nodes while ``report`` is called."""

    def __init__(self, metrics: RouterMetrics, nodes: Nodes, models: Collection[str]) -> None:
        self._metrics = metrics
        self._nodes = nodes
        self._models = models
        self._asking = NodeQueries(nodes)
        self._traffic = TrafficLog(metrics.ttft.fine_bounds, metrics.itl.fine_bounds)
        self._life = secrets.token_hex(4)
        self._heard: dict[Key, tuple[float, str, str]] = {}  # when a node was last there, its id and model
        self._now = msgspec.Raw()  # JSON of a live.Now, as of the second:
        self._now_at = -1
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sample(0)
        self._task = asyncio.create_task(self._run(), name="samples")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._asking.close()

    def report(self, life: str = "", second: int = -1) -> bytes:
        """A ``live.Report``, as JSON, for somebody who has seen the history of that life up to that second."""
        self._asking.look()
        if self._now_at != self._traffic.second:  # all who look in the same second see the same
            self._now = msgspec.Raw(msgspec.json.encode(self._look()))
            self._now_at = self._traffic.second
        history = self._traffic.history(second if life == self._life else -1)
        return msgspec.json.encode(_Report(self._life, self._now, history))

    # ------------------------------------------------------------ each second

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            second = int(loop.time() - began) + 1
            await asyncio.sleep(began + second - loop.time())
            self._sample(second)

    def _sample(self, second: int) -> None:
        metrics, now = self._metrics, asyncio.get_running_loop().time()
        waiting = int(_value(metrics.waiting))
        views = [view for view in self._nodes.views() if view.ready and view.model in self._models]
        sample = TrafficSample(
            at=now,
            running=int(_value(metrics.in_flight)) - waiting,
            waiting=waiting,
            outcomes=_outcomes(metrics.requests),
            prompt_tokens=int(_value(metrics.prompt_tokens)),
            cached_tokens=int(_value(metrics.cached_tokens)),
            ttft=tuple(metrics.ttft.counts),
            itl=tuple(metrics.itl.counts),
            kv_prefill=_kv_share(view for view in views if view.role == "prefill"),
            kv_decode=_kv_share(view for view in views if view.role == "decode"),
        )
        self._traffic.add(second, sample)
        listed = {(node.role, node.address): node for node in self._nodes}
        self._heard = {key: heard for key, heard in self._heard.items() if key in listed}
        for key, node in listed.items():
            if node.description is not None:
                self._heard[key] = now, node.description.node_id, node.description.model

    # ------------------------------------------------------------ when somebody looks

    def _look(self) -> live.LiveNow:
        nodes = [self._node(node) for node in self._nodes]
        nodes.sort(key=lambda node: (node.role != "prefill", node.state == "ready", node.name, node.address))
        names = {node.address: node.name or node.address for node in nodes if node.role == "prefill"}
        links: list[live.LiveLink] = []
        decodes = []
        for (role, address), answers in self._asking.answers.items():
            if role == "decode" and answers.known:
                decodes.append(answers)
                _, name, _ = self._heard.get((role, address), (0.0, address, ""))
                links += answers.links(name, names)
        links.sort(key=lambda link: (link.transport != "none", -link.byte_rate, link.prefill, link.decode))
        exposed = self._asking.exposed.quantiles()
        return live.LiveNow(
            version=_VERSION,
            models=[_model(name, nodes) for name in self._models],
            traffic=self._traffic.traffic(),
            nodes=nodes,
            handoffs=handoffs_of(decodes, links, exposed) if decodes else None,
            links=links[:_LINKS],
            num_links=len(links),
            num_connected=sum(link.transport != "none" for link in links),
        )

    def _node(self, node: NodeClient) -> live.LiveNode:
        key = node.role, node.address
        view, description = node.view(), node.description
        if view is None or description is None:
            if key not in self._heard:
                return live.LiveNode("", node.role, node.address, "", "unreachable")
            at, name, model = self._heard[key]
            silent = max(0.0, asyncio.get_running_loop().time() - at)
            return live.LiveNode(name, node.role, node.address, model, "lost", lost_seconds=silent)
        used = view.model in self._models and description.role == node.role
        answers, load = self._asking.answers.get(key), view.load
        running = load.requests - load.waiting
        decodes = node.role == "decode" and bool(view.throughput.decode)
        return live.LiveNode(
            name=view.node_id,
            role=node.role,
            address=node.address,
            model=view.model,
            state=description.state if used else "unused",
            running=running,
            waiting=load.waiting,
            backlog_tokens=load.backlog,
            backlog_seconds=view.throughput.prompt.at(load.backlog) if load.backlog else 0.0,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            step_seconds=view.throughput.decode.at(max(1, running)) if decodes else None,
            measured=answers.measured() if answers is not None and answers.known else None,
        )


def _model(name: str, nodes: list[live.LiveNode]) -> live.LiveModel:
    count = Counter(
        (node.role, node.state == "ready") for node in nodes if node.model == name and node.state != "unused"
    )
    prefill, decode = (count[role, True] for role in ("prefill", "decode"))
    return live.LiveModel(name, prefill, prefill + count["prefill", False], decode, decode + count["decode", False])


def _kv_share(views: Iterable[NodeView]) -> float | None:
    loads = [view.load for view in views]
    total = sum(load.total_blocks for load in loads)
    return 1 - sum(load.free_blocks for load in loads) / total if total else None


def _value(metric: prometheus.Counter | prometheus.Gauge) -> float:
    """Of one without labels."""
    return float(next(sample.value for family in metric.collect() for sample in family.samples))


def _outcomes(requests: prometheus.Counter) -> Counter[str]:
    """How requests have ended, at all endpoints."""
    found: Counter[str] = Counter()
    for family in requests.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.labels["outcome"]] += int(sample.value)
    return found
