"""Batches the outgoing entries of a long-lived gRPC stream into as few messages as possible."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from engine.frontend.violations import Violations
from pdserve.errors import RequestError
from pdserve.rpc.errors import abort

M = TypeVar("M")

_MOST_UNSENT = 4096  # entries; beyond, no messages are read that would produce more
_MOST_BULK = 4 << 20  # bytes of large entries in a message, far below MAX_MESSAGE_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class StreamWriter(Generic[M]):
    """Collects entries into the next message while gRPC's flow control delays the one before.

    Large entries are spread over several messages.
    """

    def __init__(self, kind: Callable[[], M]) -> None:
        self._kind = kind
        self._messages = deque([kind()])  # unsent, oldest first; entries are added to the last one
        self._size = 0  # entries
        self._bulk = 0  # bytes of large entries in the last message
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._size

    def put(self, bulk: int = 0) -> M:
        """Return the last unsent message, to add one entry to at once; ``bulk`` is a large entry's size in bytes."""
        self._size += 1
        self._wake.set()
        if bulk:
            if self._bulk + bulk > _MOST_BULK:
                self._messages.append(self._kind())
                self._bulk = 0
            self._bulk += bulk
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
        self._size = self._bulk = 0
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
