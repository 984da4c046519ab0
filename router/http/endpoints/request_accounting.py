"""Metrics, log line and root span of each request to an endpoint that computes with a model.

    request ─┬─ prepare     body, chat template, tokens, grammar; below it, images
             ├─ admission   waits for a slot at the nodes
             ├─ generate    per prompt and attempt at a decode node
             └─ pool        per call of a prefill node, for embeddings and scores

See docs/traces.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.types import Scope

from pdserve.errors import PdserveError
from pdserve.logs import request_fields
from pdserve.tracing.spans import CURRENT_SPAN, NO_SPAN
from router.dialect.dialect import Dialect
from router.errors import status_and_type
from router.fleet.policy import RoutingHint
from router.gate.admission import RequestAdmission
from router.gate.keys import Client
from router.gate.rate_limits import Headers
from router.generation.generation import RequestGeneration
from router.generation.usage import Usage
from router.http.request_ids import given_request_id, request_id_headers
from router.http.routing_headers import routing_hint
from router.metrics import ModelMetrics
from router.service import ServedModel, Service

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left before it got one


class RequestAccounting:
    """One request from its arrival; ``arrived`` is in seconds of ``time.monotonic``."""

    def __init__(self, service: Service, dialect: Dialect[Any], client: Client, scope: Scope) -> None:
        given_id = given_request_id(scope)
        self.request_id = given_id or uuid4().hex
        self._has_header = given_id is not None
        path = scope["path"]
        self.arrived = monotonic()
        self.model = ""  # until the body names it
        self.metrics: ModelMetrics  # metrics of ``model``
        self._scope = scope
        self._trusts_headers = service.options.trust_routing_headers
        self._metrics = service.metrics
        self._log_requests = service.options.log_requests
        self._dialect = dialect
        self._endpoint = dialect.name
        self._client = client
        self._usage = Usage()
        self._ttft: float | None = None
        self._outcome = "server_error"  # unless another outcome is recorded
        self._status = 500
        self._span_error: PdserveError | str = self._outcome  # "" for success and client errors
        self.span = service.tracer.begin(f"POST {path}", scope["headers"])
        if self.span is not NO_SPAN:
            self.span.set({"http.request.method": "POST", "http.route": path, "pdserve.request_id": self.request_id})
        self._stage = self.span.child("prepare")
        CURRENT_SPAN.set(self._stage)

    def use_id(self, request_id: str) -> None:
        """Take the request id of the body, unless a header has set one or ``request_id`` is empty."""
        if request_id and not self._has_header:
            self.request_id = request_id
            if self.span is not NO_SPAN:
                self.span.set({"pdserve.request_id": request_id})

    @property
    def id_headers(self) -> Headers:
        return request_id_headers(self._dialect.errors, self.request_id)

    def prepared(self) -> None:
        """Note that the prompts are tokenized and admission begins."""
        self._metrics.prepared.observe(monotonic() - self.arrived)
        self._stage.end()
        self._stage = self.span.child("admission")

    def admitted(self) -> None:
        self._stage.end()

    def use_model(self, model: ServedModel) -> ServedModel:
        """Note the model of the request, and return it."""
        self.model = model.name
        self.metrics = self._metrics.of(model.base)
        return model

    @property
    def hint(self) -> RoutingHint:
        """The wishes of trusted headers. Raises RequestError."""
        return routing_hint(self._scope, self._trusts_headers)

    def computed(self, usage: Usage) -> None:
        self._usage = usage

    @contextmanager
    def generating(self, generation: RequestGeneration, admission: RequestAdmission) -> Iterator[None]:
        """Count the tokens of a generation at its end, also for the limits of its client."""
        try:
            yield
        finally:
            self._generated(generation)
            admission.record_output(self._usage.completion_tokens, self._usage.cached_tokens)

    def _generated(self, generation: RequestGeneration) -> None:
        self._usage = generation.usage
        self._ttft = generation.ttft
        for run in generation.runs:
            self.metrics.count_choices([(len(choice.token_ids), choice.finish_reason) for choice in run.choices])

    def finished(self, outcome: str) -> None:
        """Note that the whole response was sent, possibly with an error event."""
        self._outcome = outcome
        self._status = 200
        self._span_error = "" if outcome == "ok" else outcome

    def failed(self, error: PdserveError) -> None:
        self._status, self._outcome = status_and_type(error)
        self._span_error = error if self._status >= 500 else ""

    def disconnected(self) -> None:
        self._outcome = "disconnected"
        self._status = _CLIENT_CLOSED_REQUEST
        self._span_error = ""

    def close(self) -> None:
        seconds = monotonic() - self.arrived
        metrics = self._metrics
        metrics.requests.labels(self._endpoint, self._outcome).inc()
        metrics.count_key_request(self._client.name, self._outcome)
        metrics.duration.of(self._endpoint).observe(seconds)
        if self.model:
            self.metrics.count_end(seconds, self._ttft)
            if self._outcome == "ok":
                self.metrics.count_tokens(self._usage.prompt_tokens, self._usage.completion_tokens)
        self._end_spans()
        if self._log_requests:
            self._log(seconds)

    def _end_spans(self) -> None:
        self._stage.end()
        if self.span is NO_SPAN:
            return
        usage = self._usage
        attributes: dict[str, str | int] = {
            "http.response.status_code": self._status,
            "gen_ai.operation.name": self._dialect.trace_name,
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
        if usage.image_tokens:
            attributes["pdserve.image_tokens"] = usage.image_tokens
        self.span.set(attributes)
        if self._ttft is not None:
            self.span.set({"gen_ai.response.time_to_first_chunk": self._ttft})
        if self._span_error:
            self.span.fail(self._span_error)
        if self._outcome != "ok":
            self.span.set({"error.type": self._outcome})  # for client errors, too
        self.span.end()

    def _log(self, seconds: float) -> None:
        usage = self._usage
        key = self._client.name
        fields = {
            "endpoint": self._endpoint,
            "outcome": self._outcome,
            "status": self._status,
            "model": self.model,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "ttft_seconds": None if self._ttft is None else round(self._ttft, 6),
            "seconds": round(seconds, 6),
            **({"key": key} if key else {}),
        }
        with_key = f" with key {key}" if key else ""
        extra = request_fields(self.request_id, self.span.trace_id, **fields)
        text = "request %s%s: %s, %s after %.3f s"
        logger.info(text, self.request_id, with_key, self._endpoint, self._outcome, seconds, extra=extra)
