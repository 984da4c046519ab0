"""Counts and logs protocol violations: each ends the stream of the peer that sent it."""

from __future__ import annotations

import logging
import time
from math import inf

from pdserve.errors import RequestError

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0  # between two lines, as a hostile peer may open streams without end


class Violations:
    """Protocol violations at one node since its start. ``count`` is exported as a metric."""

    def __init__(self) -> None:
        self.count = 0
        self._logged_count = 0
        self._log_at = -inf  # earliest time of the next line

    def add(self, peer: str, error: RequestError) -> None:
        """Count a stream of ``peer``, a network address, that ``error`` ended."""
        self.count += 1
        now = time.monotonic()
        if now < self._log_at:
            return
        more = self.count - self._logged_count - 1
        others = f"; so did {more} more streams since the last such line" if more else ""
        _log.warning("the stream of %s broke the protocol and was ended: %s%s", peer, error, others)
        self._logged_count, self._log_at = self.count, now + _LOG_SECONDS
