"""The way out of a node on a long-lived stream: all there is to say at a time travels in one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from pdserve.errors import RequestError
from pdserve.rpc.channel import abort

M = TypeVar("M")

_MOST_UNSENT = 4096  # entries beyond which nothing that would make for more is taken in
_MOST_BULK = 4 << 20  # bytes of large entries in a message, far below MAX_MESSAGE_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class StreamWriter(Generic[M]):
    """A message that grows until it is sent. A write waits for the peer to read (gRPC's flow control); what comes
    meanwhile makes up the next message, or several where entries are large.
    """

    def __init__(self, kind: Callable[[], M]) -> None:
        self._kind = kind
        self._messages = deque([kind()])  # that are to be sent, the oldest first
        self._size = 0  # entries
        self._bulk = 0  # bytes of large entries in the newest message
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._size

    def put(self, bulk: int = 0) -> M:
        """The message that is sent last, for one entry to be added at once; ``bulk`` is its size if that matters."""
        self._size += 1
        self._wake.set()
        if bulk:
            if self._bulk + bulk > _MOST_BULK:
                self._messages.append(self._kind())
                self._bulk = 0
            self._bulk += bulk
        return self._messages[-1]

    def wake(self) -> None:
        """Have ``take`` return, be it with nothing."""
        self._wake.set()

    async def take(self) -> M | None:
        """All there is so far, or as much as a message holds; waits for something, or for being woken."""
        await self._wake.wait()
        self._wake.clear()
        if self.empty:
            return None
        message = self._messages.popleft()
        if self._messages:  # these are next
            self._wake.set()
            return message
        self._messages.append(self._kind())
        self._size = self._bulk = 0
        self._taken.set()
        return message

    async def room(self) -> None:
        """Wait while too much is unsent because the peer does not read."""
        while self._size >= _MOST_UNSENT:
            self._taken.clear()
            await self._taken.wait()


async def serve(
    context: Context, outbox: StreamWriter[Any], read: Coroutine[Any, Any, None], is_over: Callable[[], bool]
) -> None:
    """A bidirectional call: write what is put into the outbox, until ``read`` has ended and ``is_over``.

    What ``read`` raises ends the call at once; a RequestError does so with its words.
    """
    reader = asyncio.create_task(read, name="stream reader")
    reader.add_done_callback(lambda _: outbox.wake())
    try:
        while not (reader.done() and (is_over() or reader.exception())):
            message = await outbox.take()
            if message is not None:
                await context.write(message)
        reader.result()
    except RequestError as exc:
        await abort(context, exc)
    finally:
        reader.cancel()
