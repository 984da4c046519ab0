"""A minimal OpenTelemetry collector: receives OTLP over HTTP and keeps the spans of each trace."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp

_WAIT_SECONDS = 20.0  # seconds


@dataclass(frozen=True, eq=False)
class Span:
    """A span exported by ``service``, with its child spans from all services."""

    raw: otlp.Span
    resource: dict[str, Any]
    children: list[Span]

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.raw.attributes)

    @property
    def events(self) -> dict[str, int]:
        """Unix time in nanoseconds, by event name."""
        return {event.name: event.time_unix_nano for event in self.raw.events}

    @property
    def start(self) -> int:
        return self.raw.start_time_unix_nano

    @property
    def end(self) -> int:
        return self.raw.end_time_unix_nano

    @property
    def failed(self) -> bool:
        return self.raw.status.code == otlp.Status.STATUS_CODE_ERROR

    def child(self, name: str) -> Span:
        (span,) = (child for child in self.children if child.name == name)
        return span

    @property
    def shape(self) -> dict[str, Any]:
        """Names of the spans below this one, as nested dicts; the last one counts if two children share a name."""
        return {child.name: child.shape for child in self.children}

    def walk(self) -> list[Span]:
        return [self, *(span for child in self.children for span in child.walk())]


class Collector:
    """Listens from construction until ``close``; port 0 is any free port."""

    def __init__(self, port: int = 0) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def trace_ids(self) -> set[str]:
        with self._lock:
            return {span.raw.trace_id.hex() for span in self._spans}

    def wait(self, name: str, *ended: str, root_name: str = "POST") -> Span:
        """Wait for a request's root span and for spans of all names in ``ended``; return the root span.

        ``name`` is the request id or the trace id. ``root_name`` is how the name of the root begins.
        """
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            root = self._find(name, root_name)
            names = [span.name for span in root.walk()] if root is not None else []
            if root is not None and {*ended} <= {*names}:
                return root
            assert time.monotonic() < end, f"trace {name} has spans {names}, expected {ended}"
            time.sleep(0.02)

    def _find(self, name: str, root_name: str) -> Span | None:
        """Return the root span with all spans below it that have arrived so far."""
        with self._lock:
            spans = [Span(span.raw, span.resource, []) for span in self._spans]
        for root in spans:
            names = root.raw.trace_id.hex(), root.attributes.get("pdserve.request_id")
            if root.name.startswith(root_name) and name in names:
                trace = [span for span in spans if span.raw.trace_id == root.raw.trace_id]
                by_id = {span.raw.span_id: span for span in trace}
                for span in sorted(trace, key=lambda span: span.start):
                    if span is not root and span.raw.parent_span_id in by_id:
                        by_id[span.raw.parent_span_id].children.append(span)
                return root
        return None

    def _take(self, message: ExportTraceServiceRequest) -> None:
        with self._lock:
            for group in message.resource_spans:
                resource: Resource = group.resource
                for scope in group.scope_spans:
                    self._spans += [Span(span, _values(resource.attributes), []) for span in scope.spans]


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute) for attribute in attributes}


def _value(attribute: KeyValue) -> Any:
    kind = attribute.value.WhichOneof("value")
    assert kind is not None
    return getattr(attribute.value, kind)
