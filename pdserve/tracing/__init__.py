"""Request traces across all processes (OpenTelemetry), off by default. See docs/traces.md.

    spans.py        interface of spans and tracers, with implementations that record nothing
    otlp.py         the recording implementation; the only file that imports OpenTelemetry
    trace_flags.py  --traces, --trace-sample

Each process records times by its own clock. The span context travels with a request (``Generate.traceparent``); a
request that is not sampled travels without it, so nodes do no work for it.
"""
