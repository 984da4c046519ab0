"""Times one prompt of a peer, as spans and as a log line.

images, load, pull ─► queue ─► prefill ─► first tokens
                                  └ lease ──────────────────────► released, aborted or expired
"""

from __future__ import annotations

import logging
import time

from node.leasing.leases import LeaseState
from node.load_spans import prefill_attributes, record_fetch
from pdserve.errors import PdserveError
from pdserve.ipc.messages import Fetched
from pdserve.logs import request_fields
from pdserve.request_cost import StepCosts
from pdserve.tracing.spans import Span

_log = logging.getLogger(__name__)


class PromptTrace:
    """Spans and, with ``log``, a log line of a prompt, from its arrival until its lease ends."""

    def __init__(self, request_id: str, num_tokens: int, span: Span, log: bool) -> None:
        self.request_id = request_id
        self._num_tokens = num_tokens
        self.span = span
        self._log = log
        self._queued_at = time.monotonic()
        self._leased_at = 0.0  # 0: not yet

    @property
    def log_fields(self) -> dict[str, object]:
        return request_fields(self.request_id, self.span.trace_id)

    def on_pixels(self, num_images: int) -> None:
        """The pixels of the prompt's images are there; it goes to the engine now."""
        now = time.monotonic()
        self.span.child("images", {"pdserve.images": num_images}, start=self._queued_at).end(now)
        self._queued_at = now

    def on_part(self, num_tokens: int, num_blocks: int) -> None:
        """``num_blocks`` more blocks were announced, up to the first ``num_tokens`` of the prompt."""
        self._leased_at = self._leased_at or time.monotonic()
        self.span.event("announced", {"pdserve.tokens": num_tokens, "pdserve.blocks": num_blocks})

    def on_fetched(self, fetched: Fetched) -> None:
        """Cached blocks have come from host memory or disk, or have not."""
        record_fetch(self.span, fetched)

    def on_computed(self, queued: float, cached_tokens: int, costs: StepCosts) -> None:
        """The first tokens were sampled. The prompt waited ``queued`` seconds for its first step.

        ``costs`` are this node's.
        """
        now = time.monotonic()
        begun = min(self._queued_at + queued, now)
        self.span.child("queue", start=self._queued_at).end(begun)
        attributes = prefill_attributes(costs, self._num_tokens - cached_tokens)
        self.span.child("prefill", attributes, start=begun).end(now)
        self.span.set({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
        if self._log:
            fields = {"prompt_tokens": self._num_tokens, "cached_tokens": cached_tokens}
            parts = {"queue_seconds": round(queued, 6), "prefill_seconds": round(now - begun, 6)}
            text = "request %s: %d tokens prefilled, %d of them cached: queue %.4f s, prefill %.4f s"
            extra = request_fields(self.request_id, self.span.trace_id, **fields, **parts)
            _log.info(text, self.request_id, self._num_tokens, cached_tokens, queued, now - begun, extra=extra)

    def on_pulled(self, cached_tokens: int) -> None:
        """The KV of ``cached_tokens`` tokens was found in the prefix cache, and is all that the peer gets."""
        self.span.set({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
        if self._log:
            fields = {"prompt_tokens": self._num_tokens, "cached_tokens": cached_tokens}
            extra = request_fields(self.request_id, self.span.trace_id, **fields)
            text = "request %s: KV of %d of %d tokens is cached for a pull"
            _log.info(text, self.request_id, cached_tokens, self._num_tokens, extra=extra)

    def on_failed(self, error: PdserveError) -> None:
        self.span.child("prefill", start=self._queued_at).end()
        self.span.fail(error)
        if self._log:
            extra = request_fields(self.request_id, self.span.trace_id, error=type(error).__name__)
            _log.info("request %s: not prefilled: %s", self.request_id, error, extra=extra)

    def on_lease_end(self, state: LeaseState) -> None:
        if self._leased_at:
            self.span.child("lease", {"pdserve.lease.end": state}, start=self._leased_at).end()
        if state is LeaseState.EXPIRED:
            self.span.fail("lease_expired")
        self.span.end()
