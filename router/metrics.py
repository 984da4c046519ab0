"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.exposition import generate_latest

from pdserve.metrics import MODEL_LABELS, MetricSet, model_labels
from pdserve.records import FinishReason

_ABORTED = "abort"  # vLLM's finish reason of a choice that did not end by itself
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_BUCKETS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
)
_LAG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ModelMetrics:
    """Metrics of the requests to one model."""

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.of(model)
        self.cached_tokens = metrics.cached_tokens.of(model)
        self.output_tokens = metrics.output_tokens.of(model)
        self.ttft = metrics.ttft.of(model)
        self.itl = metrics.itl.of(model)
        self.pauses = metrics.pauses
        self.replayed_tokens = metrics.replayed_tokens
        self.migrations = metrics.migrations
        self.refused_outputs = metrics.refused_outputs
        self._duration = metrics.model_duration.of(model)
        self._decode = metrics.decode.of(model)
        self._prompt_length = metrics.prompt_length.of(model)
        self._output_length = metrics.output_length.of(model)
        self._longest_output = metrics.longest_output.of(model)
        self._finished = {
            reason: metrics.finished.labels(*model_labels(model), reason) for reason in (*FinishReason, _ABORTED)
        }

    def count_end(self, seconds: float, ttft: float | None) -> None:
        """Count a request that has ended after ``seconds``."""
        self._duration.observe(seconds)
        if ttft is not None:
            self._decode.observe(max(0.0, seconds - ttft))

    def count_tokens(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count the lengths of a request that has ended well."""
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(output_tokens)

    def count_choices(self, choices: Sequence[tuple[int, str]]) -> None:
        """Count the choices of a prompt: output tokens and finish reason, empty if it did not end by itself."""
        self._longest_output.observe(max((num_tokens for num_tokens, _ in choices), default=0))
        for _, finish_reason in choices:
            reason = "stop" if finish_reason == "tool_calls" else finish_reason  # vLLM counts tool calls as "stop"
            self._finished[reason or _ABORTED].inc()


class RouterMetrics:
    """One set per router, in its own registry. Series of known labels start at 0."""

    def __init__(self, client_names: bool = False) -> None:
        """``client_names``: export series by names of API keys."""
        self._client_names = client_names
        self._metrics = metrics = MetricSet()
        self.registry = metrics.registry
        ProcessCollector(registry=self.registry)
        self._add_connections(metrics)
        self._add_requests(metrics)
        self._add_tokens(metrics)
        self._add_keys(metrics)
        self._add_response_store(metrics)
        self._add_images(metrics)
        self._add_nodes(metrics)

    def _add_connections(self, metrics: MetricSet) -> None:
        self.connections = metrics.gauge("pdserve_connections", "Open connections of clients.")
        self.evicted_connections = metrics.counter(
            "pdserve_evicted_connections", "Idle connections closed because there were more than --max-connections."
        )
        self.refused_connections = metrics.counter(
            "pdserve_refused_connections", "Requests with a 503 because no connection was idle then."
        )
        self.stalled_clients = metrics.counter(
            "pdserve_stalled_clients", "Connections closed because the client read nothing for --client-stall-timeout."
        )
        self.body_bytes = metrics.gauge(
            "pdserve_request_body_bytes", "Bytes of large request bodies that are not parsed yet."
        )

    def _add_requests(self, metrics: MetricSet) -> None:
        self.requests = metrics.counter(
            "pdserve_requests",
            "Requests to models by endpoint and outcome (ok, disconnected, or the error type).",
            ["endpoint", "outcome"],
        )
        self.in_flight = metrics.gauge("pdserve_requests_in_flight", "Requests to models in progress.")
        self.waiting = metrics.gauge("pdserve_requests_waiting", "Requests to models that wait for a slot.")
        self.pauses = metrics.counter("pdserve_client_pauses", "Requests paused because their client does not read.")
        self.finished = metrics.counter(
            "vllm:request_success", "Choices that ended, by reason.", [*MODEL_LABELS, "finished_reason"]
        )
        self.prepared = metrics.histogram(
            "pdserve_prepare_seconds",
            "Time from a request's arrival to its tokenized prompts, when it starts to wait for a slot.",
            _TTFT_BUCKETS,
        )
        self.queued = metrics.histogram("pdserve_queue_seconds", "Time that requests waited for a slot.", _TTFT_BUCKETS)
        self.duration = metrics.labeled_histogram(
            "pdserve_request_duration_seconds",
            "Time from a request's arrival to the end of its response.",
            "endpoint",
            _DURATION_BUCKETS,
        )
        self.model_duration = metrics.model_histogram(
            "",
            "Time from a request's arrival to the end of its response.",
            _DURATION_BUCKETS,
            also=["vllm:e2e_request_latency_seconds"],
        )
        self.decode = metrics.model_histogram(
            "pdserve_request_decode_seconds",
            "Time from a request's first token to the end of its response.",
            _DURATION_BUCKETS,
            also=["vllm:request_decode_time_seconds"],
        )
        self.loop_lag = metrics.histogram(
            "pdserve_router_loop_lag_seconds", "How late the event loop ran a timer of 10 ms.", _LAG_BUCKETS
        )

    def _add_tokens(self, metrics: MetricSet) -> None:
        self.prompt_tokens = metrics.model_counter(
            "pdserve_prompt_tokens", "Prompt tokens sent to nodes.", also=["vllm:prompt_tokens"]
        )
        self.cached_tokens = metrics.model_counter(
            "pdserve_cached_prompt_tokens",
            "Prompt tokens found in a prefix cache.",
        )
        self.expected_cached_tokens = metrics.counter(
            "pdserve_expected_cached_prompt_tokens",
            "Prompt tokens expected in a prefix cache; compare pdserve_cached_prompt_tokens.",
        )
        self.output_tokens = metrics.model_counter(
            "pdserve_output_tokens", "Output tokens received.", also=["vllm:generation_tokens"]
        )
        self.prompt_length = metrics.model_histogram(
            "pdserve_request_prompt_tokens",
            "Prompt tokens of each request that ended well.",
            _TOKEN_BUCKETS,
            also=["vllm:request_prompt_tokens"],
        )
        self.output_length = metrics.model_histogram(
            "pdserve_request_output_tokens",
            "Output tokens of each request that ended well.",
            _TOKEN_BUCKETS,
            also=["vllm:request_generation_tokens"],
        )
        self.longest_output = metrics.model_histogram(
            "",
            "Output tokens of the longest choice of each prompt.",
            _TOKEN_BUCKETS,
            also=["vllm:request_max_num_generation_tokens"],
        )
        self.ttft = metrics.model_histogram(
            "pdserve_time_to_first_token_seconds",
            "Time from the request's arrival to the first token of each prompt.",
            _TTFT_BUCKETS,
            also=["vllm:time_to_first_token_seconds"],
        )
        self.itl = metrics.model_histogram(
            "pdserve_inter_token_latency_seconds",
            "Time between two tokens of a choice, as received.",
            _ITL_BUCKETS,
            also=["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
        )

    def _add_keys(self, metrics: MetricSet) -> None:
        self.unauthorized = metrics.counter("pdserve_unauthorized_requests", "Requests without a valid API key.")
        self.unauthorized_limited = metrics.counter(
            "pdserve_unauthorized_limited_requests",
            "Of these, with a 429, because their address had sent too many unknown keys.",
        )
        self.key_reloads = metrics.counter(
            "pdserve_key_file_reloads",
            "Changes of the API key file, by whether they took effect (ok, failed).",
            ["outcome"],
            series=("ok", "failed"),
        )
        self.key_requests = metrics.counter(
            "pdserve_key_requests", "Generating requests by API key name and outcome.", ["key", "outcome"]
        )
        self.key_tokens = metrics.counter(
            "pdserve_key_tokens", "Tokens by API key name and kind (prompt, output).", ["key", "kind"]
        )

    def _add_response_store(self, metrics: MetricSet) -> None:
        self.stored_responses = metrics.gauge("pdserve_stored_responses", "Responses in the store (--response-store).")
        self.stored_bytes = metrics.gauge("pdserve_stored_response_bytes", "Bytes of responses in the store.")
        self.store_errors = metrics.counter(
            "pdserve_response_store_errors", "Responses that could not be stored, and failed reads of the store."
        )

    def _add_images(self, metrics: MetricSet) -> None:
        self.images = metrics.counter(
            "pdserve_loaded_images",
            "Images of requests, by outcome (loaded; refused: the file is faulty; failed: the router lacks memory).",
            ["outcome"],
            series=("loaded", "refused", "failed"),
        )
        self.image_seconds = metrics.histogram(
            "pdserve_image_decode_seconds", "Time to decode and resize an image.", _TTFT_BUCKETS
        )
        self.image_fetch_seconds = metrics.labeled_histogram(
            "pdserve_image_fetch_seconds",
            "Time to fetch an image by URL, by outcome (fetched; refused: URL or server is faulty, or slow; failed).",
            "outcome",
            _TTFT_BUCKETS,
            ("fetched", "refused", "failed"),
        )
        self.image_bytes = metrics.gauge(
            "pdserve_loaded_image_bytes", "Pixels, and files to store, of the images of running requests."
        )

    def _add_nodes(self, metrics: MetricSet) -> None:
        self.migrations = metrics.counter(
            "pdserve_migrations",
            "Prompts moved to another node, by reason (lost: the node died, hung or restarted; failed: it "
            "reported a failure; crashed: its engine ended in a step with the prompt; malformed: it sent a malformed "
            "output; stalled: its step took too long; drained: it is draining; images: it lacked pixels; moved: "
            "another node has less to do, and reads the KV).",
            ["reason"],
            series=("lost", "failed", "crashed", "malformed", "stalled", "drained", "images", "moved"),
        )
        self.refused_outputs = metrics.counter(
            "pdserve_refused_outputs",
            "Outputs of decode nodes that cannot be their request's, by field.",
            ["field"],
            series=("choice", "token_id", "logprobs", "prompt_logprobs", "cached_tokens"),
        )
        self.replayed_tokens = metrics.counter(
            "pdserve_replayed_tokens", "Output tokens sent along with migrated prompts."
        )
        self.placements = metrics.counter(
            "pdserve_placements",
            "Prompts sent to nodes, by policy and location of the prefill (local: on the decode node).",
            ["policy", "prefill"],
        )
        self.nodes_ready = metrics.gauge("pdserve_nodes_ready", "Ready nodes.", ["role", "model"])

    def show_index_rebuilds(self, read: Callable[[], int]) -> None:
        self._metrics.read_counter(
            "pdserve_prefix_index_rebuilds",
            "Times that the prefix index of a node differed from its cache and was built again.",
            read,
        )

    def of(self, model: str) -> ModelMetrics:
        return ModelMetrics(self, model)

    def count_key_request(self, name: str, outcome: str) -> None:
        if self._client_names and name:
            self.key_requests.labels(name, outcome).inc()

    def count_key_tokens(self, name: str, kind: str, num_tokens: int) -> None:
        if self._client_names and name:
            self.key_tokens.labels(name, kind).inc(num_tokens)

    def export(self) -> bytes:
        return generate_latest(self.registry)
