"""Metrics of nodes that decode; docs/metrics.md describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from pdserve.metrics import MetricSet

TTFT_PARTS = ("reserve", "queue", "prefill", "lost")  # parts of the time to first token; docs/traces.md
_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)  # seconds


class DecodeMetrics:
    """``exposed`` is observed once per successful handoff, ``first_step`` at the engine's first token after it."""

    def __init__(self, model: str) -> None:
        self._metrics = metrics = MetricSet(model)
        self.requests = metrics.counter("pdserve_decode_requests", "Requests received.")
        self.request_failures = metrics.counter("pdserve_decode_request_failures", "Requests that ended with an error.")
        self.handed_over = metrics.counter(
            "pdserve_requests_handed_over", "Requests that other nodes continue, as this node or its P drains."
        )
        self.local_prefills = metrics.counter("pdserve_local_prefills", "Prompts prefilled on this node by choice.")
        self.handoffs = metrics.counter("pdserve_handoffs", "Handoffs begun.")
        self.ahead_tokens = metrics.counter(
            "pdserve_handoff_ahead_tokens", "Tokens after the first that P decoded ahead while D read the KV."
        )
        self.handoff_failures = metrics.counter(
            "pdserve_handoff_failures", "Handoffs that failed, and requests whose prefill node was not connected."
        )
        self.handoff_refusals = metrics.counter("pdserve_handoff_refusals", "Handoffs that P refused for lack of room.")
        self.recomputes = metrics.counter(
            "pdserve_handoff_recomputes", "Prompts prefilled on this node after a failed handoff."
        )
        self.recomputed_tokens = metrics.counter(
            "pdserve_handoff_recomputed_tokens", "Prompt tokens of recomputes whose KV was not on this node."
        )
        self.exposed = metrics.histogram(
            "pdserve_handoff_exposed_seconds", "From the first token to confirmed KV.", _BOUNDS
        )
        self.first_step = metrics.histogram(
            "pdserve_handoff_first_step_seconds", "From confirmed KV to the next token.", _BOUNDS
        )
        self._ttft = metrics.labeled_histogram(
            "pdserve_ttft_part_seconds",
            "Parts of the time to first token.",
            "part",
            _BOUNDS,
            TTFT_PARTS,
            also={"queue": "vllm:request_queue_time_seconds", "prefill": "vllm:request_prefill_time_seconds"},
        )

    def observe_ttft(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self._ttft.of(part).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect()
