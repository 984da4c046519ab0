"""What a node exports to Prometheus, whichever its role. Names, units and meanings: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.frontend.health import State
from engine.frontend.node_service import VERSION
from engine.ipc.messages import Status, Totals
from pdserve.request_cost import TYPICAL

if TYPE_CHECKING:
    from engine.frontend.node import Node

_TOTALS = {  # by field
    "steps": "Steps with a forward pass.",
    "step_seconds": "That these took, each without those before it.",
    "preemptions": "Sequences that made way because KV blocks were lacking.",
    "preempted_tokens": "Tokens whose KV that dropped.",
    "admitted_prompt_tokens": "Prompt tokens of admitted requests.",
    "prefix_cached_tokens": "Of these, found in the prefix cache.",
    "sampled_tokens": "Tokens sampled.",
    "host_seconds": "Of the step loop at work, without waiting for results.",
}


class NodeMetrics(Collector):
    """Of what the front knows at this moment; the engine is never asked. Collected on any thread: it only reads."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node, status = self._node, self._node.link.status
        yield _info(node)
        yield _gauges("pdserve_node_state", "1 for the state that the node is in.", "state", _states(node.state))
        yield from _of_load(status)
        for name in Totals.__struct_fields__:
            yield CounterMetricFamily(f"pdserve_{name}", _TOTALS[name], getattr(status.totals, name))
        yield from _gaps(node)
        yield from node.role.metrics()


def _info(node: Node) -> Metric:
    config = node.config
    labels = {
        "node_id": node.node_id,
        "role": node.role.name,
        "model": config.served_model_name,
        "runner": config.decision.runner,
        "version": VERSION,
        "compat_hash": node.compat_hash,
    }
    return InfoMetricFamily("pdserve_node", "What the node is.", labels)


def _states(current: State) -> dict[str, float]:
    return {state.value: float(state is current) for state in State}


def _of_load(status: Status) -> Iterator[Metric]:
    blocks = {name: getattr(status, name) for name in ("free", "held", "leased", "quarantined")}
    yield _gauges("pdserve_kv_blocks", "KV blocks by what they are used for.", "use", blocks)
    used = 1.0 - status.free / status.total if status.total else 0.0
    yield GaugeMetricFamily("pdserve_kv_use_ratio", "KV blocks that are not free, of all.", used)
    requests = {name: getattr(status, name) for name in ("waiting", "reading", "running")}
    yield _gauges("pdserve_node_requests", "Requests that the node has.", "state", requests)
    throughput = status.throughput.prompt or TYPICAL.prompt
    seconds = throughput.at(status.backlog) if status.backlog else 0.0
    yield GaugeMetricFamily("pdserve_prompt_backlog_tokens", "Prompt tokens to be computed here.", status.backlog)
    yield GaugeMetricFamily(
        "pdserve_prompt_backlog_seconds", "Estimated time to compute that backlog, in seconds.", seconds
    )


def _gaps(node: Node) -> Iterator[Metric]:
    """The longest times in which nothing could happen, since start."""
    beat = node.link.pulse.last
    for who, what, seconds in (
        ("step_loop", "Longest part of a turn of the step loop outside of the runner.", beat.loop_gap),
        ("engine_thread", "Longest time in which no thread of the engine could run.", beat.thread_gap),
        ("event_loop", "Longest time in which the front could do nothing.", node.watch.longest_gap),
    ):
        yield GaugeMetricFamily(f"pdserve_{who}_gap_max_seconds", what, seconds)


def _gauges(name: str, documentation: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for value, amount in values.items():
        family.add_metric([value], amount)
    return family
