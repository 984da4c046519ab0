"""Flags of request traces, and the tracer they select."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from pdserve.flags.declaration import Flag
from pdserve.tracing.spans import NO_TRACER, Tracer

_PATH = "/v1/traces"  # default path of OTLP over HTTP


def make_tracer(url: str, role: str, instance: str, share: float = 1.0) -> Tracer:
    """Return the tracer of process ``instance``. It records ``share`` of the traces that begin here."""
    if not url:
        return NO_TRACER
    from pdserve.tracing.otlp import OtlpTracer  # imported on demand: OpenTelemetry is slow to import

    return OtlpTracer(url, role, instance, share)


def collector_url(text: str) -> str:
    """Return the URL of OTLP posts; add the default path if there is none. Empty means no traces."""
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # invalid port
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not a collector URL; use e.g. http://host:4318")
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_PATH}"


TRACES = Flag(
    "send request traces to this OpenTelemetry collector as OTLP over HTTP, e.g. http://collector:4318",
    metavar="URL",
    parse=collector_url,
)
TRACE_SAMPLE = Flag(
    "share of requests without a traceparent header to trace, 0 … 1", metavar="SHARE", at_least=0, at_most=1
)
