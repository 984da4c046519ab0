"""The interface of spans and tracers. The classes here record nothing: null objects for a process without traces.

router ──── request ─┬─ prepare, admission
                     └─ generate ──► D: decode ─┬─ reserve, queue, prefill, first step, further steps
                                                └─ handoff ─┬─ transfer
                                                            └──► P: prefill node ── queue, prefill, lease
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum

from pdserve.errors import PdserveError

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI has them

NO_ATTRIBUTES: Attributes = {}


class SpanKind(Enum):
    """Which side of a remote call a span describes."""

    INTERNAL = "internal"
    CLIENT = "client"


class Span:
    """A span that is not recorded. Times are seconds of ``time.monotonic``; None means now.

    ``traceparent`` and ``tracestate`` carry the span to other processes (W3C Trace Context); empty if it is not
    sampled. ``trace_id`` is hexadecimal, for logs.
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
        return self

    def set(self, attributes: Attributes) -> None:
        """Set attributes; existing names are replaced."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Record an event at the current time."""

    def fail(self, error: PdserveError | str) -> None:
        """Mark the span as failed, with an error or the name of a reason."""

    def end(self, at: float | None = None) -> None:
        """End the span; later calls are ignored. A span that never ends is never exported."""


NO_SPAN = Span()

#: The span of the work that a router's task does for its request: parents of spans that others record on its way.
CURRENT_SPAN: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


class _ForwardedSpan(Span):
    """The caller's span context, forwarded by a process that records nothing."""

    def __init__(self, traceparent: str, tracestate: str) -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate


class Tracer:
    """A tracer that records nothing."""

    def begin(self, name: str, headers: Headers, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        """Begin the span of an HTTP request, in the client's trace if the headers name one, else in a new trace.

        The client's trace flags decide whether it is recorded, or else the sampler.
        """
        return NO_SPAN

    def continue_span(
        self, name: str, traceparent: str, tracestate: str, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        """Begin a child of another process's span. An empty ``traceparent`` means it is not sampled."""
        return _ForwardedSpan(traceparent, tracestate) if traceparent else NO_SPAN

    def close(self) -> None:
        """Send the remaining spans, within a second. Idempotent."""


NO_TRACER = Tracer()
