"""Prometheus metrics of every node, whatever its role. Names, units and meanings: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.context import NodeContext
from node.health import State
from pdserve import __version__
from pdserve.ipc.heartbeat_monitor import LivenessWatch
from pdserve.ipc.messages import Heartbeat, Status, Totals
from pdserve.request_cost import TYPICAL

_TOTALS = {  # by field
    "steps": "Steps with a forward pass.",
    "step_seconds": "Duration of these steps, each without the time of the step before it.",
    "prompt_seconds": "What prompts added to the duration of these steps.",
    "mixed_steps": "Steps that computed prompts beside sequences that decode.",
    "mixed_step_seconds": "Duration of these steps.",
    "mixed_prompt_tokens": "Prompt tokens computed in these steps.",
    "preemptions": "Sequences preempted because KV blocks were lacking, or for fairness.",
    "fair_preemptions": "Of these, to make room for a client with far fewer sequences.",
    "preempted_tokens": "Tokens whose KV was dropped by preemption.",
    "admitted_prompt_tokens": "Prompt tokens of admitted requests.",
    "prefix_cached_tokens": "Admitted prompt tokens found in the prefix cache.",
    "sampled_tokens": "Tokens sampled.",
    "host_seconds": "Work of the step loop, without waiting for results.",
}


class NodeMetrics(Collector):
    """Reads the frontend's state, without a round trip to the engine. Any thread may collect."""

    def __init__(self, node: NodeContext, watch: LivenessWatch, role_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._node = node
        self._watch = watch
        self._role_metrics = role_metrics

    def collect(self) -> Iterator[Metric]:
        node, status = self._node, self._node.engine.status
        yield _info(node)
        states = {state.value: float(state is node.state) for state in State}
        yield _gauges("pdserve_node_state", "1 for the current state of the node.", "state", states)
        yield from _load(status)
        for name in Totals.__struct_fields__:
            yield CounterMetricFamily(f"pdserve_{name}", _TOTALS[name], getattr(status.totals, name))
        yield CounterMetricFamily(
            "pdserve_stream_violations", "Streams ended for a violation of the protocol.", node.violations.count
        )
        changes = CounterMetricFamily(
            "pdserve_weight_changes", "Ordered changes of the weights, sleeps and wake-ups.", labels=["outcome"]
        )
        for outcome, count in node.weight_changes.items():
            changes.add_metric([outcome], count)
        yield changes
        yield from _gaps(node.engine.monitor.last, self._watch.longest_gap)
        yield from self._role_metrics()


def exported_registry(metrics: Collector, engine_pid: Callable[[], int | None]) -> CollectorRegistry:
    """Return ``metrics`` with the resource use of the frontend and engine processes."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    ProcessCollector(namespace="pdserve_engine", pid=lambda: str(engine_pid()), registry=registry)
    return registry


def _info(node: NodeContext) -> Metric:
    labels = {
        "node_id": node.node_id,
        "role": node.role,
        "model": node.config.served_model_name,
        "runner": node.engine.decision.runner,
        "version": __version__,
        "compat_hash": node.compat_hash,
        "weights": node.weights,
    }
    return InfoMetricFamily("pdserve_node", "Identity of the node.", labels)


def _load(status: Status) -> Iterator[Metric]:
    blocks = {name: getattr(status, name) for name in ("free", "held", "leased", "quarantined")}
    yield _gauges("pdserve_kv_blocks", "KV blocks by use.", "use", blocks)
    used = 1.0 - status.free / status.total if status.total else 0.0
    yield GaugeMetricFamily("pdserve_kv_use_ratio", "Share of KV blocks that are not free.", used)
    requests = {name: getattr(status, name) for name in ("waiting", "reading", "running", "paused")}
    yield _gauges("pdserve_node_requests", "Requests on the node.", "state", requests)
    throughput = status.throughput.prompt or TYPICAL.prompt
    seconds = throughput.at(status.backlog) if status.backlog else 0.0
    yield GaugeMetricFamily(
        "pdserve_itl_target_seconds", "Gap between tokens that steps with prompts keep; 0: none.", status.itl_target
    )
    yield GaugeMetricFamily("pdserve_prompt_backlog_tokens", "Prompt tokens to be computed here.", status.backlog)
    yield GaugeMetricFamily(
        "pdserve_prompt_backlog_seconds", "Estimated time to compute that backlog, in seconds.", seconds
    )


def _gaps(heartbeat: Heartbeat, event_loop_gap: float) -> Iterator[Metric]:
    """Longest stalls since start."""
    for name, documentation, seconds in (
        ("step_loop", "Longest part of a step loop iteration outside the runner.", heartbeat.loop_gap),
        ("engine_thread", "Longest time in which no thread of the engine could run.", heartbeat.thread_gap),
        ("event_loop", "Longest time in which the frontend's event loop could not run.", event_loop_gap),
    ):
        yield GaugeMetricFamily(f"pdserve_{name}_gap_max_seconds", documentation, seconds)


def _gauges(name: str, documentation: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family
