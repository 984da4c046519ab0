"""Record spans with OpenTelemetry's SDK and send them to a collector as OTLP over HTTP.

A thread sends spans in batches. If the collector is unreachable, the queue of ``_MAX_QUEUED`` spans drops the oldest,
and the log says so once. The SDK's variables set headers, certificates, the delay between batches and process
attributes (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_BSP_SCHEDULE_DELAY,
OTEL_RESOURCE_ATTRIBUTES).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve import __version__
from pdserve.errors import PdserveError, RequestError
from pdserve.tracing.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Headers, Span, SpanKind, Tracer

_log = logging.getLogger(__name__)

_MAX_QUEUED = 8192  # spans of a few KB each
_BATCH = 128  # spans; encoding takes some 20 µs each under the GIL, so larger batches would delay streams
_CLOSE_SECONDS = 1.0
_CLOCK_READS = 4  # attempts to read both clocks within _ACCURATE_NS
_ACCURATE_NS = 2_000

_W3C = TraceContextTextMapPropagator()


class OtlpTracer(Tracer):
    """The recording implementation of ``Tracer``."""

    def __init__(self, url: str, role: str, instance: str, share: float) -> None:
        attributes = {
            "service.name": f"pdserve-{role}",
            "service.instance.id": instance,
            "service.version": __version__,
        }
        # ``close`` sends the last spans; the SDK would block the exit for half a minute.
        resource = Resource.create(attributes)
        self._provider = TracerProvider(ParentBasedTraceIdRatio(share), resource, shutdown_on_exit=False)
        exporter = _LoggedExporter(url)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED, max_export_batch_size=_BATCH)
        )
        self._tracer = self._provider.get_tracer("pdserve", __version__)
        self._closed = False

    def begin(self, name: str, headers: Headers, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        names = (b"traceparent", b"tracestate")
        carrier = {key.decode(): value.decode("latin-1") for key, value in headers if key in names}
        return self._serve(name, carrier, attributes)

    def continue_span(
        self, name: str, traceparent: str, tracestate: str, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        if not traceparent:
            return NO_SPAN
        return self._serve(name, {"traceparent": traceparent, "tracestate": tracestate}, attributes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

    def _serve(self, name: str, carrier: dict[str, str], attributes: Attributes) -> Span:
        context = _W3C.extract(carrier, Context())
        offset = _clock_offset()
        now = time.monotonic_ns() + offset
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER, attributes, start_time=now)
        return _Recorded(self._tracer, span, offset) if span.is_recording() else NO_SPAN


class _Recorded(Span):
    """A recorded span. ``offset`` in ns leads from ``time.monotonic`` to wall time.

    All spans of a request in this process share the offset, so a clock adjustment changes no duration.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset = offset
        self._context = trace.set_span_in_context(span, Context())
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        self.traceparent = carrier["traceparent"]
        self.tracestate = carrier.get("tracestate", "")

    def child(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
        start: float | None = None,
    ) -> Span:
        at = self._at(start)
        span = self._tracer.start_span(name, self._context, trace.SpanKind[kind.name], attributes, start_time=at)
        return _Recorded(self._tracer, span, self._offset)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.add_event(name, attributes, self._at(None))

    def fail(self, error: PdserveError | str) -> None:
        # A RequestError may quote the prompt.
        text = str(error) if isinstance(error, PdserveError) and not isinstance(error, RequestError) else None
        self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, text)

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(self._at(at))

    def _at(self, moment: float | None) -> int:
        """Return wall time in nanoseconds."""
        return (time.monotonic_ns() if moment is None else int(moment * 1e9)) + self._offset


def _clock_offset() -> int:
    """Return nanoseconds from ``time.monotonic`` to wall time; repeat if reading the clocks was interrupted."""
    offsets = []
    for _ in range(_CLOCK_READS):
        before = time.monotonic_ns()
        now = time.time_ns()
        took = time.monotonic_ns() - before
        offsets.append((took, now - before))
        if took < _ACCURATE_NS:
            break
    return min(offsets)[1]


class _LoggedExporter(SpanExporter):
    """OpenTelemetry's exporter, which logs once when it loses and when it regains the collector."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._exporter = OTLPSpanExporter(url)
        self._sdk_errors = _CapturedErrors()
        self._reached = True
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").addFilter(self._sdk_errors)
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(_Once())  # e.g. that its queue is full

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        reached = result is SpanExportResult.SUCCESS
        if reached is not self._reached:
            self._reached = reached
            if reached:
                _log.info("traces: %s accepts spans again", self._url)
            else:
                _log.warning("traces are lost: %s does not accept spans: %s", self._url, self._sdk_errors.last)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class _CapturedErrors(logging.Filter):
    """Keep the last error of the SDK instead of logging one per failed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


class _Once(logging.Filter):
    """Log each message once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.msg not in self._seen
        self._seen.add(record.msg)
        return new
