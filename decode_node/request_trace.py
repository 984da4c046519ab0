"""What a request on D waits for, one part after the other: as spans, and until its first token as a histogram's parts.

    handed off   reserve ─► queue ─► prefill ─► first token ─► transfer ─► first step ─► second token ─► decode
                            └───── at P ────┘
      and lost   reserve ─► lost ─► queue ─► prefill ─► first token ─► decode
                 … ─► first token ─► recompute ─► second token ─► decode
    else         queue ─► prefill ─► first token ─► decode

Each part begins where the one before it ends. The page is docs/traces.md.
"""

from __future__ import annotations

import logging
import time
from enum import StrEnum

from decode_node.decode_metrics import DecodeMetrics
from pdserve.errors import PdserveError
from pdserve.logs import request_fields
from pdserve.tracing.spans import NO_SPAN, Attributes, Span, SpanKind

_log = logging.getLogger(__name__)


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the router: the client has gone, or needs no more


class TraceStage(StrEnum):
    """What it waits for. Where a part has the same name it is that."""

    RESERVE = "reserve"
    REMOTE = "remote"  # first tokens from P
    PROMPT = "prefill"  # … to be computed here; the engine says later how much of it was waiting
    TRANSFER = "transfer"
    RECOMPUTE = "recompute"
    FIRST_STEP = "first step"
    DECODE = "decode"


class RequestTrace:
    """Of one request, from when it came. A span that is begun here is ended here, whatever happens."""

    def __init__(self, request_id: str, span: Span, metrics: DecodeMetrics, resumed: bool, told: bool) -> None:
        """``told``: a line in the log says what became of it. One that is ``resumed`` had its first token elsewhere."""
        self.request_id = request_id
        self.span = span
        self._metrics = metrics
        self._resumed = resumed
        self._told = told
        self._stage = TraceStage.PROMPT
        self._came = self._since = time.monotonic()  # when the stage began
        self._parts: dict[str, float] = {}  # seconds
        self._handoff = self._transfer = NO_SPAN
        self._reads = [0, 0, 0]  # that have ended, their bytes, and the ranges these came in

    @property
    def log_fields(self) -> dict[str, object]:
        """What lines in the log say besides their message."""
        return request_fields(self.request_id, self.span.trace_id)

    def reserve(self) -> None:
        """It asks for blocks, to read KV into."""
        self._stage = TraceStage.RESERVE

    def on_reserved(self) -> None:
        self._pass(TraceStage.RESERVE)
        self._stage = TraceStage.PROMPT

    def start_handoff(self, prefill_node: str, num_tokens: int) -> Span:
        """P is asked for the KV of so many tokens. What it does for it is a part of the span that is returned."""
        attributes: Attributes = {"pdserve.prefill_node": prefill_node, "pdserve.handoff.tokens": num_tokens}
        self._handoff = self.span.child("handoff", attributes, SpanKind.CLIENT, self._since)
        self._stage = TraceStage.REMOTE
        return self._handoff

    def on_first_tokens(self, queued: float) -> None:
        """P has sampled them. For so many seconds the prompt has waited there, by P's clock."""
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

    def on_read_ended(self, num_bytes: int, num_ranges: int) -> None:
        self._reads = [before + new for before, new in zip(self._reads, (1, num_bytes, num_ranges), strict=True)]

    def on_confirmed(self) -> None:
        """All of P's KV is here and may be used."""
        now = time.monotonic()
        exposed = self._parts["transfer"] = now - self._since
        self._metrics.exposed.observe(exposed)
        self._transfer.set({"pdserve.transfer.exposed": exposed})
        self._end_handoff(now)
        self._since = now
        self._stage = TraceStage.FIRST_STEP

    def on_handoff_failed(self, error: PdserveError) -> None:
        """P's KV will not be used."""
        self._handoff.fail(error)
        self._end_handoff(time.monotonic())

    def restart(self) -> None:
        """The prompt is computed here instead, or at another P."""
        if self._stage is TraceStage.REMOTE:
            now = time.monotonic()
            self._parts["lost"] = self._parts.get("lost", 0.0) + now - self._since
            self._since = now
        self._stage = TraceStage.RECOMPUTE if self._stage is TraceStage.TRANSFER else TraceStage.PROMPT

    def on_output(self, queued: float) -> None:
        """The engine's first one. A prompt that it has computed had waited for so many seconds."""
        if self._stage is TraceStage.PROMPT:
            begun = min(self._since + queued, time.monotonic())
            self._pass("queue", begun)
            self._pass("prefill")
            self._on_first_token()
        else:
            self._pass(self._stage)
            if self._stage is TraceStage.FIRST_STEP:
                self._metrics.first_step.observe(self._parts[TraceStage.FIRST_STEP])
        self._stage = TraceStage.DECODE

    def on_end(self, outcome: Outcome, error: PdserveError | None) -> None:
        """Nothing more becomes of it."""
        if self._stage in (TraceStage.REMOTE, TraceStage.TRANSFER):
            self._end_handoff(time.monotonic())
        else:
            self._pass(self._stage)
        if error is not None:
            self.span.fail(error)
        self.span.set({"pdserve.outcome": outcome})
        self.span.end()
        if self._told:
            self._tell(outcome)

    def _pass(self, part: str, at: float | None = None) -> None:
        """A part has ended, and the next begins."""
        now = time.monotonic() if at is None else at
        self._parts[part] = now - self._since
        self.span.child(part, start=self._since).end(now)
        self._since = now

    def _on_first_token(self) -> None:
        if not self._resumed:
            self._metrics.observe_ttft(self._parts)
            self.span.event("first token")

    def _end_handoff(self, now: float) -> None:
        reads, num_bytes, num_ranges = self._reads
        sizes = {"parts": reads, "bytes": num_bytes, "descriptors": num_ranges}
        self._transfer.set({f"pdserve.transfer.{name}": size for name, size in sizes.items()})
        self._transfer.end(now)
        self._handoff.end(now)

    def _tell(self, outcome: Outcome) -> None:
        seconds = time.monotonic() - self._came
        parts = ", ".join(f"{name} {part:.4f} s" for name, part in self._parts.items())
        fields = {name.replace(" ", "_") + "_seconds": round(part, 6) for name, part in self._parts.items()}
        text = "request %s: %s after %.3f s: %s"
        extra = request_fields(
            self.request_id, self.span.trace_id, outcome=outcome, seconds=round(seconds, 6), **fields
        )
        _log.info(text, self.request_id, outcome, seconds, parts, extra=extra)
