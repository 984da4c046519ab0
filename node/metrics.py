"""Prometheus metrics of nodes of every role. Names, units and meanings: docs/metrics.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.context import NodeContext
from node.health import NodeState
from pdserve import __version__
from pdserve.ipc.heartbeat_monitor import LivenessWatch
from pdserve.ipc.messages import Counters, Heartbeat, Status
from pdserve.metrics import MetricSet, Reading
from pdserve.request_cost import TYPICAL

#: vLLM's names of engine counters, by ours.
_VLLM_COUNTERS = {
    "preemptions": ["vllm:num_preemptions"],
    "admitted_prompt_tokens": ["vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"],
    "prefix_cached_tokens": ["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"],
    "spec_decode_num_drafts": ["vllm:spec_decode_num_drafts"],
    "spec_decode_num_draft_tokens": ["vllm:spec_decode_num_draft_tokens"],
    "spec_decode_num_accepted_tokens": ["vllm:spec_decode_num_accepted_tokens"],
}
_USES = ("free", "held", "leased", "quarantined")  # uses of blocks and slots
_IDENTITY = ("node_id", "role", "model", "runner", "version", "compat_hash", "weights")


class NodeMetrics(Collector):
    """Reads the frontend's state, without a round trip to the engine. Any thread may collect."""

    def __init__(self, node: NodeContext, watch: LivenessWatch, role_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._role_metrics = role_metrics
        self._metrics = metrics = MetricSet(node.config.served_model_name)
        metrics.read_gauge("pdserve_node_info", "Identity of the node.", lambda: _identity(node), _IDENTITY)
        metrics.read_gauge(
            "pdserve_node_state",
            "1 for the current state of the node.",
            lambda: {(state.value,): float(state is node.state) for state in NodeState},
            ["state"],
        )
        metrics.read_counter(
            "pdserve_stream_violations",
            "Streams ended for a violation of the protocol.",
            lambda: node.violations.count,
        )
        metrics.read_gauge(
            "pdserve_image_memory_bytes",
            "Pixels of images that arrive, or whose prompts are not computed yet, in bytes.",
            lambda: node.images.num_bytes,
        )
        metrics.read_counter(
            "pdserve_image_puts",
            "Images that routers have sent.",
            lambda: {(outcome,): float(count) for outcome, count in node.images.counts.items()},
            ["outcome"],
        )
        metrics.read_counter(
            "pdserve_weight_changes",
            "Ordered changes of the weights, sleeps and wake-ups.",
            lambda: {(outcome,): float(count) for outcome, count in node.weight_changes.items()},
            ["outcome"],
        )

        metrics.read_gauge(
            "pdserve_adapter_info",
            "1 for each LoRA adapter that the node serves.",
            lambda: {
                (adapter.name, adapter.digest[:12], str(adapter.rank)): 1.0 for adapter in node.adapters if adapter.name
            },
            ["adapter", "digest", "rank"],
        )
        metrics.read_gauge(
            "vllm:lora_requests_info",
            "Time of the reading, in Unix seconds; labels are the adapters of running and waiting requests.",
            lambda: _adapters_in_use(node),
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )

        def status() -> Status:
            return node.engine.status

        _read_cache(metrics, node, status)
        _read_requests(metrics, status)
        _read_steps(metrics, status)
        _read_gaps(metrics, watch, lambda: node.engine.monitor.last)

    def collect(self) -> Iterator[Metric]:
        return chain(self._metrics.collect(), self._role_metrics())


def _read_cache(metrics: MetricSet, node: NodeContext, status: Callable[[], Status]) -> None:
    metrics.read_gauge(
        "pdserve_kv_blocks",
        "KV blocks by use.",
        lambda: _fields(status(), *_USES),
        ["use"],
    )
    metrics.read_gauge(
        "pdserve_kv_use_ratio",
        "Share of KV blocks that are not free.",
        lambda: _used_share(status()),
        also=["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    )
    metrics.read_gauge(
        "vllm:cache_config_info",
        "1; labels are sizes of the KV cache.",
        lambda: {(str(node.engine.kv_layout.block_size), str(node.engine.kv_layout.num_blocks)): 1.0},
        ["block_size", "num_gpu_blocks"],
    )
    metrics.read_gauge(
        "pdserve_state_slots",
        "Slots of recurrent state by use; 0 if the model has no recurrent layers.",
        lambda: {(use,): float(count) for use, count in zip(_USES, status().state_slots, strict=True)},
        ["use"],
    )
    metrics.read_gauge(
        "pdserve_host_kv_blocks",
        "KV blocks in host memory by use; 0 without --host-kv-memory.",
        lambda: {(use,): float(count) for use, count in zip(("free", "stored"), status().host_blocks, strict=True)},
        ["use"],
    )
    metrics.read_gauge(
        "pdserve_disk_kv_blocks",
        "KV blocks on disk that this node knows of; 0 without --disk-kv.",
        lambda: status().disk_blocks,
    )


def _read_requests(metrics: MetricSet, status: Callable[[], Status]) -> None:
    metrics.read_gauge(
        "pdserve_node_requests",
        "Requests on the node.",
        lambda: _fields(status(), "waiting", "reading", "running", "paused"),
        ["state"],
    )
    metrics.read_gauge(
        "vllm:num_requests_running",
        "Requests that run or read their KV.",
        lambda: status().reading + status().running,
    )
    metrics.read_gauge("vllm:num_requests_waiting", "Requests that wait for blocks.", lambda: status().waiting)
    metrics.read_gauge(
        "pdserve_itl_target_seconds",
        "Gap between tokens that steps with prompts keep; 0: none.",
        lambda: status().itl_target,
    )
    metrics.read_gauge("pdserve_prompt_backlog_tokens", "Prompt tokens to be computed here.", lambda: status().backlog)
    metrics.read_gauge(
        "pdserve_prompt_backlog_seconds",
        "Estimated time to compute that backlog, in seconds.",
        lambda: _backlog_seconds(status()),
    )


def _read_steps(metrics: MetricSet, status: Callable[[], Status]) -> None:
    metrics.read_totals("pdserve", Counters, lambda: {(): status().totals}, also=_VLLM_COUNTERS)
    metrics.read_counter(
        "pdserve_spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their position among those of a decode.",
        lambda: {(str(at),): float(count) for at, count in enumerate(status().totals.accepted_per_position)},
        ["position"],
    )


def _read_gaps(metrics: MetricSet, watch: LivenessWatch, heartbeat: Callable[[], Heartbeat]) -> None:
    metrics.read_gauge(
        "pdserve_step_loop_gap_max_seconds",
        "Longest part of a step loop iteration outside the runner, since start.",
        lambda: heartbeat().loop_gap,
    )
    metrics.read_gauge(
        "pdserve_engine_thread_gap_max_seconds",
        "Longest time in which no thread of the engine could run, since start.",
        lambda: heartbeat().thread_gap,
    )
    metrics.read_gauge(
        "pdserve_event_loop_gap_max_seconds",
        "Longest time in which the frontend's event loop could not run, since start.",
        lambda: watch.longest_gap,
    )


def exported_registry(metrics: Collector, engine_pid: Callable[[], int | None]) -> CollectorRegistry:
    """Return ``metrics`` with the resource use of the frontend and engine processes."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    ProcessCollector(namespace="pdserve_engine", pid=lambda: str(engine_pid()), registry=registry)
    return registry


def _identity(node: NodeContext) -> Reading:
    model = node.config.served_model_name
    runner = node.engine.decision.runner
    return {(node.node_id, node.role, model, runner, __version__, node.compat_hash, node.weights): 1.0}


def _adapters_in_use(node: NodeContext) -> Reading:
    limits = node.config.adapters
    if limits is None:
        return {}
    names = {adapter.digest: adapter.name for adapter in node.adapters if adapter.name}
    status = node.engine.status
    running, waiting = (
        ",".join(names.get(digest, digest[:12]) for digest in digests)
        for digests in (status.running_adapters, status.waiting_adapters)
    )
    return {(str(limits.max_loras), running, waiting): time.time()}


def _fields(status: Status, *names: str) -> Reading:
    return {(name,): float(getattr(status, name)) for name in names}


def _used_share(status: Status) -> float:
    return 1.0 - status.free / status.total if status.total else 0.0


def _backlog_seconds(status: Status) -> float:
    prompt = status.costs.prompt or TYPICAL.prompt
    return prompt.at(status.backlog) if status.backlog else 0.0
