"""Spans that are recorded, by OpenTelemetry's SDK, and sent to a collector as OTLP over HTTP.

A thread sends them in batches. At most ``_MOST_WAITING`` spans wait for it; while the collector does not take them, the
oldest are dropped, and the log says so once. Headers, certificates and the pause between batches are set by the SDK's
own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_BSP_SCHEDULE_DELAY),
as are more attributes of the process (OTEL_RESOURCE_ATTRIBUTES).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.errors import PdserveError, RequestError
from pdserve.tracing.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Headers, Span, SpanKind, Tracer

_log = logging.getLogger(__name__)

_MOST_WAITING = 8192  # spans; each is a few KB
_BATCH = 128  # spans: they are encoded under Python's lock, in some 20 µs each, which all streams would feel
_CLOSE_SECONDS = 1.0
_LOOKS, _SOON = 4, 2_000  # at the clocks, most; nanoseconds between two looks that are as good as none

_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
_W3C = TraceContextTextMapPropagator()


class OtlpTracer(Tracer):
    """See ``Tracer``."""

    def __init__(self, url: str, role: str, instance: str, share: float) -> None:
        who = {
            "service.name": f"pdserve-{role}",
            "service.instance.id": instance,
            "service.version": version("pdserve"),
        }
        # What is left is sent by ``close``; at exit the SDK would wait for half a minute.
        self._provider = TracerProvider(ParentBasedTraceIdRatio(share), Resource.create(who), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_Collector(url), max_queue_size=_MOST_WAITING, max_export_batch_size=_BATCH)
        )
        self._tracer = self._provider.get_tracer("pdserve", version("pdserve"))
        self._closed = False

    def begin(self, name: str, headers: Headers, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        names = (b"traceparent", b"tracestate")
        carrier = {key.decode(): value.decode("latin-1") for key, value in headers if key in names}
        return self._serve(name, carrier, attributes)

    def go_on(self, name: str, traceparent: str, tracestate: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
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
    """``offset`` nanoseconds lie between the clock of ``time.monotonic`` and that of the calendar: the same for all
    spans of a request in this process, so that a clock that is set meanwhile changes no duration.
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
        span = self._tracer.start_span(name, self._context, _KINDS[kind], attributes, start_time=at)
        return _Recorded(self._tracer, span, self._offset)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        self._span.add_event(name, attributes, self._at(None))

    def fail(self, error: PdserveError | str) -> None:
        # What a client got wrong may be told in words of its prompt.
        words = str(error) if isinstance(error, PdserveError) and not isinstance(error, RequestError) else None
        self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
        self._span.set_status(trace.StatusCode.ERROR, words)

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(self._at(at))

    def _at(self, moment: float | None) -> int:
        """Nanoseconds of the calendar."""
        return (time.monotonic_ns() if moment is None else int(moment * 1e9)) + self._offset


def _clock_offset() -> int:
    """From ``time.monotonic`` to the calendar, in nanoseconds; looked at again where it took long to look."""
    found = []
    for _ in range(_LOOKS):
        before = time.monotonic_ns()
        now = time.time_ns()
        took = time.monotonic_ns() - before
        found.append((took, now - before))
        if took < _SOON:
            break
    return min(found)[1]


class _Collector(SpanExporter):
    """OpenTelemetry's exporter, but that it stops or resumes to reach its collector is said once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._exporter = OTLPSpanExporter(url)
        self._silencer = _Silencer()
        self._reached = True
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").addFilter(self._silencer)
        logging.getLogger("opentelemetry.sdk._shared_internal").addFilter(_Once())  # such as that its queue is full

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        reached = result is SpanExportResult.SUCCESS
        if reached is not self._reached:
            self._reached = reached
            if reached:
                _log.info("traces are taken by %s again", self._url)
            else:
                _log.warning("traces are lost, %s does not take them: %s", self._url, self._silencer.heard)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class _Silencer(logging.Filter):
    """Keeps to itself what the SDK says at every batch that it cannot send."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.heard = record.getMessage()
        return False


class _Once(logging.Filter):
    """Lets everything be said once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.msg not in self._said
        self._said.add(record.msg)
        return new
