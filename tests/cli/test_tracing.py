"""Flags of traces, and what a process does that has none."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from pdserve.tracing.spans import NO_SPAN, SpanKind
from pdserve.tracing.trace_flags import collector_url, make_tracer, share

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
def test_a_collector_has_a_usual_path(given: str, posted_to: str) -> None:
    assert collector_url(given) == posted_to


@pytest.mark.parametrize(
    "given", ["collector:4318", "grpc://collector:4317", "http://", "http://a:b", "http://a:99999"]
)
def test_what_is_no_collector_is_refused(given: str) -> None:
    with pytest.raises(ArgumentTypeError, match="write http://host:4318"):
        collector_url(given)


def test_shares_are_between_nothing_and_all() -> None:
    assert [share(text) for text in ("0", "0.01", "1")] == [0.0, 0.01, 1.0]
    for wrong in ("1.5", "-1", "nan", "some"):
        with pytest.raises(ArgumentTypeError, match="choose 0 … 1"):
            share(wrong)


def test_a_process_without_traces_passes_contexts_on() -> None:
    tracer = make_tracer("", "decode", "d0")
    span = tracer.go_on("decode node", *CONTEXT).child("handoff", kind=SpanKind.CLIENT)
    assert (span.traceparent, span.tracestate) == CONTEXT
    assert tracer.go_on("decode node", "", "") is NO_SPAN
    assert tracer.begin("POST /", [(b"traceparent", CONTEXT[0].encode())]) is NO_SPAN
