"""Traces of requests through all processes (OpenTelemetry), off by default. What they tell: docs/traces.md.

    spans.py    what code that serves requests knows: spans and tracers, and those that record nothing
    otlp.py     the ones that do; alone imports OpenTelemetry
    flags.py    --traces, --trace-sample

Each process records times by its own clock. Where a request goes on in another process, the context of a span travels
along (``Generate.traceparent``), and what is not sampled travels without: then no node does anything for it.
"""
