"""Spans as the code that serves requests sees them. Here are those that record nothing, so that nobody needs an ``if``.

router ──── request ─┬─ prepare, admission
                     └─ generate ──► D: decode ─┬─ reserve, queue, prefill, first step, further steps
                                                └─ handoff ─┬─ transfer
                                                            └──► P: prefill node ── queue, prefill, lease
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from pdserve.errors import PdserveError

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI has them

NO_ATTRIBUTES: Attributes = {}


class SpanKind(Enum):
    """Whether a span's other side is a process of its own."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span:
    """Nobody records this one. Moments are seconds of ``time.monotonic``; None is now.

    ``traceparent`` and ``tracestate`` name it to other processes, as W3C Trace Context has it; empty where they need
    not know. ``trace_id`` is in hexadecimal, for logs.
    """

    traceparent = ""
    tracestate = ""
    trace_id = ""

    def child(
        self,
        name: str,
        attributes: Attributes = NO_ATTRIBUTES,
        kind: SpanKind = SpanKind.INTERNAL,
        start: float | None = None,
    ) -> Span:
        """Begin a part of this one."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes, or replace those of the same names."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Something happened now."""

    def fail(self, error: PdserveError | str) -> None:
        """It did not do what it was for: an error of ours, or the name of another reason."""

    def end(self, at: float | None = None) -> None:
        """Only the first call counts. What is never ended is never told of."""


NO_SPAN = Span()


class _PassedOn(Span):
    """Of a process without traces between two that have them: what it calls continues the span of its caller."""

    def __init__(self, traceparent: str, tracestate: str) -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate


class Tracer:
    """Of a process that records nothing."""

    def begin(self, name: str, headers: Headers, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """The span of an HTTP request: part of the client's trace if it names one, else the first of a new one.

        Whether that is recorded is the client's decision, or that of the sampler.
        """
        return NO_SPAN

    def go_on(self, name: str, traceparent: str, tracestate: str, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """The part of another process's span that happens here; ``traceparent`` is empty where it is not recorded."""
        return _PassedOn(traceparent, tracestate) if traceparent else NO_SPAN

    def close(self) -> None:
        """Send what is left, for a second at most. Idempotent."""


NO_TRACER = Tracer()
