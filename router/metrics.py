"""What the router exports to Prometheus."""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from pdserve.metrics import FastHistogram

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

disable_created_metrics()  # a second series for each, of when it began, that nobody looks at


class RouterMetrics:
    """One set per router, in a registry of its own. Series of known labels are there from the start, at 0."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "pdserve_requests",
            "Generating requests by endpoint and outcome (ok, disconnected, or the kind of error).",
            ["endpoint", "outcome"],
        )
        self.in_flight = gauge("pdserve_requests_in_flight", "Generating requests now.")
        self.prompt_tokens = counter("pdserve_prompt_tokens", "Prompt tokens sent to nodes.")
        self.cached_tokens = counter(
            "pdserve_cached_prompt_tokens", "Prompt tokens that a prefix cache had.", registry=self.registry
        )
        self.output_tokens = counter("pdserve_output_tokens", "Output tokens received.")
        self.ttft = FastHistogram(
            "pdserve_time_to_first_token_seconds",
            "From the request's arrival to the first token of each prompt.",
            _TTFT_BUCKETS,
        )
        self.registry.register(self.ttft)
        self.itl = FastHistogram(
            "pdserve_inter_token_latency_seconds", "Between two tokens of a choice, as received.", _ITL_BUCKETS
        )
        self.registry.register(self.itl)
        self.prepared = histogram(
            "pdserve_prepare_seconds",
            "From a request's arrival to its prompts as tokens, when it begins to wait for a place.",
            buckets=_TTFT_BUCKETS,
        )
        self.duration = histogram(
            "pdserve_request_duration_seconds",
            "From a request's arrival to the end of its response.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
        )
        self.waiting = gauge("pdserve_requests_waiting", "Of these, waiting for a place.")
        self.queued = histogram(
            "pdserve_queue_seconds",
            "How long requests waited for a place.",
            buckets=_TTFT_BUCKETS,
        )
        self.unauthorized = counter(
            "pdserve_unauthorized_requests", "Requests without a known API key.", registry=self.registry
        )
        self.key_reloads = counter(
            "pdserve_key_file_reloads",
            "Changes of the file of API keys, by whether they took effect (ok, failed).",
            ["outcome"],
        )
        for outcome in ("ok", "failed"):
            self.key_reloads.labels(outcome)
        self.key_requests = counter(
            "pdserve_key_requests",
            "Generating requests by name of the API key and outcome.",
            ["key", "outcome"],
        )
        self.key_tokens = counter(
            "pdserve_key_tokens",
            "Tokens by name of the API key and kind (prompt, output).",
            ["key", "kind"],
        )
        self.migrations = counter(
            "pdserve_migrations",
            "Prompts that went on at another decode node, by reason (lost: the node is dead, hung or restarted; "
            "failed: it said so; drained: it was told to end).",
            ["reason"],
        )
        for reason in ("lost", "failed", "drained"):
            self.migrations.labels(reason)
        self.replayed_tokens = counter(
            "pdserve_replayed_tokens", "Output tokens sent along with these.", registry=self.registry
        )
        self.placements = counter(
            "pdserve_placements",
            "Prompts sent to nodes, by policy and by where they are prefilled (local: on the decode node).",
            ["policy", "prefill"],
        )
        self.expected_cached_tokens = counter(
            "pdserve_expected_cached_prompt_tokens",
            "Prompt tokens that a prefix cache was expected to have; pdserve_cached_prompt_tokens is what it had.",
        )
        self.nodes_ready = gauge(
            "pdserve_nodes_ready", "Nodes that are ready.", ["role", "model"], registry=self.registry
        )

    def export(self) -> bytes:
        return generate_latest(self.registry)
