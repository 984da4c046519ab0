"""What becomes of one prompt on P, as spans and as a line in the log.

queue ─► prefill ─► first tokens
            └ lease ──────────────────────► released, aborted or expired
"""

from __future__ import annotations

import logging
import time

from pdserve.errors import PdserveError
from pdserve.logs import request_fields
from pdserve.tracing.spans import Span
from prefill_node.leases import LeaseState

_log = logging.getLogger(__name__)


class PrefillTrace:
    """From when the prompt came until its lease has ended, which is its end. Moments are of ``time.monotonic``."""

    def __init__(self, request_id: str, num_tokens: int, span: Span, told: bool) -> None:
        """``told``: a line in the log says how the prompt went."""
        self.request_id = request_id
        self._num_tokens = num_tokens
        self._span = span
        self._told = told
        self._came = time.monotonic()
        self._leased_at = 0.0  # 0: nothing is

    @property
    def about(self) -> dict[str, object]:
        """What lines in the log say besides their message."""
        return request_fields(self.request_id, self._span.trace_id)

    def on_part(self, num_tokens: int, num_blocks: int) -> None:
        """D may read more blocks, up to a token of the prompt."""
        self._leased_at = self._leased_at or time.monotonic()
        self._span.event("announced", {"pdserve.tokens": num_tokens, "pdserve.blocks": num_blocks})

    def on_computed(self, queued: float, cached_tokens: int) -> None:
        """The first tokens are there. The prompt has waited for so many seconds before its first step."""
        now = time.monotonic()
        begun = min(self._came + queued, now)
        self._span.child("queue", start=self._came).end(begun)
        self._span.child("prefill", start=begun).end(now)
        self._span.set({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
        if self._told:
            fields = {"prompt_tokens": self._num_tokens, "cached_tokens": cached_tokens}
            parts = {"queue_seconds": round(queued, 6), "prefill_seconds": round(now - begun, 6)}
            text = "request %s: %d tokens prefilled, %d of them cached: queue %.4f s, prefill %.4f s"
            extra = request_fields(self.request_id, self._span.trace_id, **fields, **parts)
            _log.info(text, self.request_id, self._num_tokens, cached_tokens, queued, now - begun, extra=extra)

    def on_failed(self, error: PdserveError) -> None:
        """There will be no first tokens."""
        self._span.child("prefill", start=self._came).end()
        self._span.fail(error)
        if self._told:
            extra = request_fields(self.request_id, self._span.trace_id, error=type(error).__name__)
            _log.info("request %s: not prefilled: %s", self.request_id, error, extra=extra)

    def on_lease_end(self, how: LeaseState) -> None:
        """D has given it back, or time has; or it ended before anything was leased."""
        if self._leased_at:
            self._span.child("lease", {"pdserve.lease.end": how}, start=self._leased_at).end()
        if how is LeaseState.EXPIRED:
            self._span.fail("lease_expired")
        self._span.end()
