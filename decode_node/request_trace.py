"""Times the parts of a request on D, as spans and as a histogram of the time to first token. See docs/traces.md.

    with a handoff   reserve ─► queue ─► prefill ─► first token ─► transfer ─► first step ─► second token ─► decode
                                └───── at P ────┘
    that fails       reserve ─► lost ─► queue ─► prefill ─► first token ─► decode
                     … ─► first token ─► recompute ─► second token ─► decode
    without          queue ─► prefill ─► first token ─► decode

Each part begins where the previous one ends.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum

from decode_node.decode_metrics import DecodeMetrics
from node.load_spans import record_fetch
from pdserve.errors import PdserveError
from pdserve.ipc.messages import Fetched
from pdserve.logs import request_fields
from pdserve.records import ReadResult
from pdserve.tracing.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Span, SpanKind

_log = logging.getLogger(__name__)


class RequestOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the router: the client has gone, or a stop string was found


class TraceStage(StrEnum):
    """The event that a request waits for. The values name the parts of a trace."""

    RESERVE = "reserve"
    REMOTE = "remote"  # first tokens of P; the parts queue and prefill
    PROMPT = "prefill"  # first tokens of this node's engine; the parts queue and prefill
    TRANSFER = "transfer"
    RECOMPUTE = "recompute"
    FIRST_STEP = "first step"
    DECODE = "decode"


class RequestTrace:
    """Spans, metrics and the log line of one request. Every span that begins here also ends here."""

    def __init__(self, request_id: str, span: Span, metrics: DecodeMetrics, resumed: bool, log: bool) -> None:
        """``log`` writes a log line at the end. A ``resumed`` request had its first token on another node."""
        self.request_id = request_id
        self.span = span
        self._metrics = metrics
        self._resumed = resumed
        self._log = log
        self._stage = TraceStage.PROMPT
        self._started_at = time.monotonic()
        self._since = self._started_at  # when the stage began
        self._parts: dict[str, float] = {}  # seconds
        self._pixels_seconds = 0.0
        self._handoff = NO_SPAN
        self._transfer = NO_SPAN
        self._num_reads = 0  # ended
        self._read_bytes = 0
        self._read_descriptors = 0

    @property
    def log_fields(self) -> dict[str, object]:
        return request_fields(self.request_id, self.span.trace_id)

    def on_fetched(self, fetched: Fetched) -> None:
        """Record a fetch of cached blocks from host memory or disk, whether it succeeded or not."""
        record_fetch(self.span, fetched)

    def on_pixels(self, num_images: int) -> None:
        """Record that the pixels have come which this node needs. The wait for them is a part of the queue's time."""
        now = time.monotonic()
        self.span.child("images", {"pdserve.images": num_images}, start=self._since).end(now)
        self._pixels_seconds = now - self._since

    def on_reserve(self) -> None:
        self._stage = TraceStage.RESERVE

    def on_reserved(self) -> None:
        self._end_part(TraceStage.RESERVE)
        self._stage = TraceStage.PROMPT

    def start_handoff(self, prefill_node: str, num_tokens: int) -> Span:
        """Begin the handoff of ``num_tokens`` uncached tokens; return the parent of P's span."""
        attributes: Attributes = {"pdserve.prefill_node": prefill_node, "pdserve.handoff.tokens": num_tokens}
        self._handoff = self.span.child("handoff", attributes, SpanKind.CLIENT, self._since)
        self._stage = TraceStage.REMOTE
        return self._handoff

    def on_first_tokens(self, queued: float) -> None:
        """Record that P's first tokens have come. ``queued`` is the prompt's wait at P in seconds, by P's clock."""
        now = time.monotonic()
        waited = now - self._since
        queued = min(queued, waited)
        self._parts |= {"queue": queued, "prefill": waited - queued}
        self._since = now
        self._handoff.event("first tokens")
        self._stage = TraceStage.TRANSFER
        self._on_first_token()

    def on_read_started(self) -> None:
        if self._transfer is NO_SPAN:
            self._transfer = self._handoff.child("transfer")

    def on_read_ended(self, read: ReadResult) -> None:
        self._num_reads += 1
        self._read_bytes += read.num_bytes
        self._read_descriptors += read.num_descriptors

    def on_pulled(self, num_tokens: int) -> None:
        """Record that the KV of ``num_tokens`` tokens was pulled; 0 or less: none."""
        self._handoff.set({"pdserve.pull.tokens": max(0, num_tokens)})

    def on_confirmed(self) -> None:
        """Record that all of P's KV has been read and confirmed."""
        now = time.monotonic()
        exposed = self._parts["transfer"] = now - self._since
        self._metrics.exposed.observe(exposed)
        self._transfer.set({"pdserve.transfer.exposed": exposed})
        self._end_handoff(now)
        self._since = now
        self._stage = TraceStage.FIRST_STEP

    def on_handoff_failed(self, error: PdserveError) -> None:
        self._handoff.fail(error)
        self._end_handoff(time.monotonic())

    def restart(self) -> None:
        """Record that the prompt is computed again, on this node or at another P."""
        if self._stage is TraceStage.REMOTE:
            now = time.monotonic()
            self._parts["lost"] = self._parts.get("lost", 0.0) + now - self._since
            self._since = now
        self._stage = TraceStage.RECOMPUTE if self._stage is TraceStage.TRANSFER else TraceStage.PROMPT

    def on_output(self, queued: float, computed: Attributes) -> None:
        """Record the engine's first output.

        ``queued``: seconds that a prompt computed here waited. ``computed``: its span's attributes, with its length.
        """
        if self._stage is TraceStage.PROMPT:
            queued += self._pixels_seconds
            self._end_part("queue", min(self._since + queued, time.monotonic()))
            self._end_part("prefill", attributes=computed)
            self._on_first_token()
        else:
            self._end_part(self._stage)
            if self._stage is TraceStage.FIRST_STEP:
                self._metrics.first_step.observe(self._parts[TraceStage.FIRST_STEP])
        self._stage = TraceStage.DECODE

    def on_end(self, outcome: RequestOutcome, error: PdserveError | None) -> None:
        if self._stage in (TraceStage.REMOTE, TraceStage.TRANSFER):
            self._end_handoff(time.monotonic())
        else:
            self._end_part(self._stage)
        if error is not None:
            self.span.fail(error)
        self.span.set({"pdserve.outcome": outcome})
        self.span.end()
        if self._log:
            self._write_log(outcome)

    def _end_part(self, part: str, at: float | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """End a part at ``at`` (default: now), where the next one begins."""
        now = time.monotonic() if at is None else at
        self._parts[part] = now - self._since
        self.span.child(part, attributes, start=self._since).end(now)
        self._since = now

    def _on_first_token(self) -> None:
        if not self._resumed:
            self._metrics.observe_ttft(self._parts)
            self.span.event("first token")

    def _end_handoff(self, now: float) -> None:
        sizes: Attributes = {
            "pdserve.transfer.parts": self._num_reads,
            "pdserve.transfer.bytes": self._read_bytes,
            "pdserve.transfer.descriptors": self._read_descriptors,
        }
        self._transfer.set(sizes)
        self._transfer.end(now)
        self._handoff.end(now)

    def _write_log(self, outcome: RequestOutcome) -> None:
        seconds = time.monotonic() - self._started_at
        parts = ", ".join(f"{name} {part:.4f} s" for name, part in self._parts.items())
        fields = {name.replace(" ", "_") + "_seconds": round(part, 6) for name, part in self._parts.items()}
        text = "request %s: %s after %.3f s: %s"
        extra = request_fields(
            self.request_id, self.span.trace_id, outcome=outcome, seconds=round(seconds, 6), **fields
        )
        _log.info(text, self.request_id, outcome, seconds, parts, extra=extra)
