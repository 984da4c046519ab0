"""Batches the outgoing entries of a long-lived gRPC stream into as few messages as possible."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Generic, TypeVar

import grpc

from pdserve.errors import RequestError
from pdserve.rpc.errors import abort
from pdserve.rpc.message_limits import BATCH_LIMIT, ENTRY_BYTES

M = TypeVar("M")

_MOST_UNSENT = 4096  # entries; beyond, no messages are read that would produce more

Context = grpc.aio.ServicerContext[Any, Any]

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


class StreamWriter(Generic[M]):
    """Collects entries into the next message while gRPC's flow control delays the one before.

    Entries beyond the size of a message go into further ones.
    """

    def __init__(self, kind: Callable[[], M]) -> None:
        self._kind = kind
        self._messages = deque([kind()])  # unsent, oldest first; entries are added to the last one
        self._size = 0  # entries
        self._bytes = 0  # of the last message, at most
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._size

    def put(self, num_bytes: int = 0) -> M:
        """Return the last unsent message, to add one entry to at once; ``num_bytes`` are those of its long fields."""
        self._size += 1
        self._wake.set()
        self._bytes += ENTRY_BYTES + num_bytes
        if self._bytes > BATCH_LIMIT:
            self._messages.append(self._kind())
            self._bytes = ENTRY_BYTES + num_bytes
        return self._messages[-1]

    def wake(self) -> None:
        """End a waiting ``take``, even without entries."""
        self._wake.set()

    async def take(self) -> M | None:
        """Wait for entries and return the oldest unsent message; None if only woken."""
        await self._wake.wait()
        self._wake.clear()
        if self.empty:
            return None
        message = self._messages.popleft()
        if self._messages:
            self._wake.set()
            return message
        self._messages.append(self._kind())
        self._size = self._bytes = 0
        self._sent.set()
        return message

    async def room(self) -> None:
        """Wait while too many entries are unsent because the peer does not read."""
        while self._size >= _MOST_UNSENT:
            self._sent.clear()
            await self._sent.wait()


async def serve(
    context: Context,
    writer: StreamWriter[Any],
    read: Coroutine[Any, Any, None],
    is_over: Callable[[], bool],
    violations: Violations,
) -> None:
    """Serve a bidirectional call: send what ``writer`` collects, until ``read`` has ended and ``is_over()``.

    An exception of ``read`` ends the call at once; a RequestError is a violation of the protocol, counted in
    ``violations``, and becomes the call's status message.
    """
    reader = asyncio.create_task(read, name="stream reader")
    reader.add_done_callback(lambda _: writer.wake())
    try:
        while not (reader.done() and (is_over() or reader.exception())):
            message = await writer.take()
            if message is not None:
                await context.write(message)
        reader.result()
    except RequestError as exc:
        violations.add(context.peer(), exc)
        await abort(context, exc)
    finally:
        reader.cancel()
