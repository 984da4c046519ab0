"""Reads and parses request bodies, within bounds on their memory and on the time for which they hold the event loop.

arriving ──► unfinished ──► complete ──► parsed        a small body: on the event loop
              │  may be evicted   └──► thread ──┘      a large one: scanned (router/text/json_bounds.py), then parsed
              └── counted in the budget ────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from pdserve.errors import DeadlineExceeded, Overloaded
from router.errors import BodyTooLarge, ClientDisconnected
from router.metrics import RouterMetrics
from router.text.fair_slots import FairSlots
from router.text.json_bounds import SMALL_BYTES, check_json

BODIES_IN_MEMORY = 4  # large bodies of the largest size that may be unfinished or unparsed at once
MIN_TOKEN_IDS = 1024 * 1024  # token ids in all prompts of a body; a longer model context raises it

_BODY_TIMEOUT = 60.0  # seconds; arriving requests are bounded by --max-inflight
_PATIENCE = 5.0  # seconds that an unfinished body keeps its memory when others need it

Body = TypeVar("Body")


class _Upload:
    """A body from its first byte until it is parsed. ``num_bytes``: its part of the budget."""

    def __init__(self, timer: asyncio.Timeout) -> None:
        self.timer = timer
        self.started = asyncio.get_running_loop().time()
        self.body = bytearray()
        self.num_bytes = 0
        self.evicted = False


class BodyReader:
    """``max_bytes`` bounds each body; all together have a budget of BODIES_IN_MEMORY such bodies.

    When it is exhausted, the oldest unfinished body gives way, or the newest if none is older than _PATIENCE.
    """

    def __init__(self, max_bytes: int, longest_context: Callable[[], int], metrics: RouterMetrics) -> None:
        """``longest_context`` returns the longest context of any model, in tokens."""
        self._max_bytes = max_bytes
        self._budget = BODIES_IN_MEMORY * max_bytes
        self._longest_context = longest_context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._slots = FairSlots(1)
        self._unfinished: dict[_Upload, None] = {}  # large uploads, oldest first
        self._num_bytes = 0
        metrics.body_bytes.set_function(lambda: self._num_bytes)

    async def read(self, receive: Receive, parse: Callable[[bytes], Body]) -> Body:
        """Return the parsed body. Raises the errors of ``parse`` and ``_receive``."""
        upload = _Upload(asyncio.timeout(_BODY_TIMEOUT))
        try:
            data = await self._receive(receive, upload)
            if len(data) <= SMALL_BYTES:
                return parse(data)
            max_token_ids = max(self._longest_context(), MIN_TOKEN_IDS)
            loop = asyncio.get_running_loop()
            async with self._slots.slot():
                return await loop.run_in_executor(self._thread, _parse_large, data, parse, max_token_ids)
        finally:
            self._release(upload)

    async def _receive(self, receive: Receive, upload: _Upload) -> bytes:
        """Return the whole body. Raises BodyTooLarge, DeadlineExceeded, Overloaded or ClientDisconnected."""
        body = upload.body
        try:
            async with upload.timer:
                while (message := await receive())["type"] != "http.disconnect":
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        text = f"the body exceeds {self._max_bytes} bytes; send less"
                        raise BodyTooLarge(text, code="body_too_large")
                    if not message.get("more_body", False):
                        self._unfinished.pop(upload, None)
                        return bytes(body)
                    if len(body) > SMALL_BYTES:
                        self._reserve(upload, len(body))
        except TimeoutError as exc:
            if upload.evicted:
                raise self._exhausted() from exc
            raise DeadlineExceeded(f"the body did not arrive within {_BODY_TIMEOUT:g} s; send it faster") from exc
        raise ClientDisconnected

    def _reserve(self, upload: _Upload, num_bytes: int) -> None:
        """Raises Overloaded if the budget is exhausted and no other upload can be evicted."""
        self._num_bytes += num_bytes - upload.num_bytes
        upload.num_bytes = num_bytes
        self._unfinished[upload] = None
        while self._num_bytes > self._budget:
            oldest = next(iter(self._unfinished))
            now = asyncio.get_running_loop().time()
            if oldest is upload or now - oldest.started < _PATIENCE:
                raise self._exhausted()
            self._release(oldest)
            oldest.evicted = True
            if not oldest.timer.expired():
                oldest.timer.reschedule(now)

    def _release(self, upload: _Upload) -> None:
        """Idempotent."""
        self._unfinished.pop(upload, None)
        self._num_bytes -= upload.num_bytes
        upload.num_bytes = 0
        upload.body.clear()  # tracebacks may hold it for long

    def _exhausted(self) -> Overloaded:
        text = f"unfinished request bodies hold their limit of {self._budget} bytes; send this one later, or faster"
        return Overloaded(text, _PATIENCE)


def _parse_large(data: bytes, parse: Callable[[bytes], Body], max_token_ids: int) -> Body:
    check_json(data, max_token_ids)
    return parse(data)
