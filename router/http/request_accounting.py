"""What is told of a request: metrics, a line in the log, and the trace that begins with it.

    request ─┬─ prepare     body, chat template, tokens, grammar
             ├─ admission   waits for a place at the nodes
             └─ generate    of each prompt, at a decode node; once more when that fails

The page is docs/traces.md.
"""

from __future__ import annotations

import logging
from time import monotonic

from starlette.types import Scope

from pdserve.errors import PdserveError
from pdserve.logs import request_fields
from pdserve.tracing.spans import NO_SPAN
from router.completions_api.response_formats import new_request_id
from router.errors import status_and_type
from router.gate.keys import Client
from router.generation.generation import RequestGeneration
from router.generation.usage import Usage
from router.service import Service

logger = logging.getLogger(__name__)

_OPERATIONS = {"completions": "text_completion", "chat": "chat", "responses": "chat"}  # as OpenTelemetry names them
_CLIENT_GONE = 499  # as nginx has it, of requests whose clients left before they got a status


class RequestAccount:
    """Of one request to an endpoint, from its arrival. ``arrived`` is of ``time.monotonic``."""

    def __init__(self, service: Service, endpoint: str, client: Client, scope: Scope) -> None:
        self.request_id = new_request_id()
        self.arrived = monotonic()
        self._metrics = service.metrics
        self._told = service.options.log_requests
        self._endpoint = endpoint
        self._client = client
        self._model = ""
        self._usage = Usage()
        self._ttft: float | None = None
        self._outcome, self._status = "server_error", 500  # of what nobody foresaw
        self._failure: PdserveError | str = self._outcome  # as its span tells it; "" where it is none, or the client's
        path = scope["path"]
        self.span = service.tracer.begin(f"POST {path}", scope["headers"])
        if self.span is not NO_SPAN:
            self.span.set({"http.request.method": "POST", "http.route": path, "pdserve.request_id": self.request_id})
        self._stage = self.span.child("prepare")

    def takes(self, model: str) -> None:
        """It is for this model."""
        self._model = model

    def waits(self) -> None:
        """It is prepared, and needs a place at the nodes."""
        self._metrics.prepared.observe(monotonic() - self.arrived)
        self._stage.end()
        self._stage = self.span.child("admission")

    def admitted(self) -> None:
        self._stage.end()

    def used(self, generation: RequestGeneration) -> None:
        """Nothing more is generated for it."""
        self._usage = generation.usage
        self._ttft = generation.ttft

    def answered(self, outcome: str) -> None:
        """All of an answer was sent, though it may have ended with an error."""
        self._outcome, self._status = outcome, 200
        self._failure = "" if outcome == "ok" else outcome

    def refused(self, error: PdserveError) -> None:
        """The answer is an error."""
        self._status, self._outcome = status_and_type(error)
        self._failure = error if self._status >= 500 else ""

    def left(self) -> None:
        """The client has gone."""
        self._outcome, self._status, self._failure = "disconnected", _CLIENT_GONE, ""

    def close(self) -> None:
        """It has ended."""
        seconds, metrics = monotonic() - self.arrived, self._metrics
        metrics.requests.labels(self._endpoint, self._outcome).inc()
        if self._client.name:
            metrics.key_requests.labels(self._client.name, self._outcome).inc()
        metrics.duration.labels(self._endpoint).observe(seconds)
        self._end_spans()
        if self._told:
            self._tell(seconds)

    def _end_spans(self) -> None:
        self._stage.end()
        if self.span is NO_SPAN:
            return
        usage = self._usage
        self.span.set(
            {
                "http.response.status_code": self._status,
                "gen_ai.operation.name": _OPERATIONS[self._endpoint],
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        if self._ttft is not None:
            self.span.set({"gen_ai.response.time_to_first_chunk": self._ttft})
        if self._failure:
            self.span.fail(self._failure)
        if self._outcome != "ok":
            self.span.set({"error.type": self._outcome})  # also where the client is to blame
        self.span.end()

    def _tell(self, seconds: float) -> None:
        usage, key = self._usage, self._client.name
        fields = {
            "endpoint": self._endpoint,
            "outcome": self._outcome,
            "status": self._status,
            "model": self._model,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "ttft_seconds": None if self._ttft is None else round(self._ttft, 6),
            "seconds": round(seconds, 6),
            **({"key": key} if key else {}),
        }
        whose = f" of key {key}" if key else ""
        extra = request_fields(self.request_id, self.span.trace_id, **fields)
        text = "request %s%s: %s, %s after %.3f s"
        logger.info(text, self.request_id, whose, self._endpoint, self._outcome, seconds, extra=extra)
