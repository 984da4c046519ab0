"""Flags of traces, and a process without traces."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from collector import Collector

from node.load_spans import record_fetch
from pdserve.errors import ConfigError
from pdserve.ipc.cache_changes import Medium
from pdserve.ipc.messages import Fetched
from pdserve.tracing.spans import NO_SPAN, SpanKind
from pdserve.tracing.trace_flags import collector_url, make_tracer
from router.options import parse_options

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=it"


@pytest.mark.parametrize(
    ("given", "posted_to"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://[::1]:4318/", "https://[::1]:4318/v1/traces"),
        ("http://gateway/otlp/v1/traces", "http://gateway/otlp/v1/traces"),
        ("", ""),
    ],
)
def test_collector_url_without_path_gets_the_otlp_path(given: str, posted_to: str) -> None:
    assert collector_url(given) == posted_to


@pytest.mark.parametrize(
    "given", ["collector:4318", "grpc://collector:4317", "http://", "http://a:b", "http://a:99999"]
)
def test_invalid_collector_url_is_refused(given: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"use e\.g\. http://host:4318"):
        collector_url(given)


def test_sample_share_is_between_0_and_1() -> None:
    for text in ("0", "0.01", "1"):
        assert parse_options(["a/model", "--trace-sample", text]).trace_sample == float(text)
    for wrong in ("1.5", "-1", "nan", "some"):
        with pytest.raises(ConfigError, match=r"must be at (least 0|most 1)|is not a number"):
            parse_options(["a/model", "--trace-sample", wrong])


def test_process_without_traces_forwards_span_contexts() -> None:
    tracer = make_tracer("", "decode", "d0")
    span = tracer.continue_span("decode node", *CONTEXT).child("handoff", kind=SpanKind.CLIENT)
    assert (span.traceparent, span.tracestate) == CONTEXT
    assert tracer.continue_span("decode node", "", "") is NO_SPAN
    assert tracer.begin("POST /", [(b"traceparent", CONTEXT[0].encode())]) is NO_SPAN


def test_load_is_a_span_of_the_measured_time_with_the_predicted_ones() -> None:
    with Collector() as collector:
        tracer = make_tracer(collector_url(collector.url), "decode", "d0")
        span = tracer.continue_span("decode node", *CONTEXT, {"pdserve.request_id": "r"})
        record_fetch(span, Fetched(1, Medium.DISK, 96, seconds=0.25, expected=0.0, computing=0.5))
        span.end()
        tracer.close()
        load = collector.wait("r", "load", root_name="decode node").child("load")
    assert load.attributes == {
        "pdserve.load.medium": "STORAGE",
        "pdserve.load.tokens": 96,
        "pdserve.load.computing": 0.5,
    }
    assert (load.end - load.start) / 1e9 == pytest.approx(0.25)
