"""Flags that have traces sent to a collector, and what follows from them."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from pdserve.tracing.spans import NO_TRACER, Tracer

_PATH = "/v1/traces"  # of OTLP over HTTP


def add_trace_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """``--traces``, which ``make_tracer`` takes."""
    parser.add_argument(
        "--traces",
        type=collector_url,
        default="",
        metavar="URL",
        help="send traces of requests to this OpenTelemetry collector, as OTLP over HTTP, such as http://collector:4318",
    )


def add_trace_sample_flag(parser: argparse.ArgumentParser) -> None:
    """``--trace-sample``, for those who begin traces."""
    parser.add_argument(
        "--trace-sample",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="trace this share of the requests whose traceparent header does not decide it, 0 … 1 (default 1)",
    )


def make_tracer(url: str, role: str, instance: str, share: float = 1.0) -> Tracer:
    """That of a process, called ``instance``. ``share`` of the traces that begin here are recorded."""
    if not url:
        return NO_TRACER
    from pdserve.tracing.otlp import OtlpTracer  # what it imports takes a while

    return OtlpTracer(url, role, instance, share)


def collector_url(text: str) -> str:
    """Where OTLP is posted: a URL without a path gets the usual one. The empty one stays: no traces."""
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL of a collector; write http://host:4318")
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_PATH}"


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; choose 0 … 1")
    return value
