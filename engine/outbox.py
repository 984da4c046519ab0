"""The way out of a node on a long-lived stream: all there is to say at a time travels in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from pdserve.errors import RequestError
from pdserve.rpc import abort

M = TypeVar("M")

_MOST_UNSENT = 4096  # entries beyond which nothing that would make for more is taken in

Context = grpc.aio.ServicerContext[Any, Any]


class Outbox(Generic[M]):
    """A message that grows until it is sent. A write waits for the peer to read (gRPC's flow control); what comes
    meanwhile makes up the next message.
    """

    def __init__(self, kind: Callable[[], M]) -> None:
        self._kind = kind
        self._message = kind()
        self._size = 0  # entries
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._size

    def put(self) -> M:
        """The message that is sent next, for one entry to be added at once."""
        self._size += 1
        self._wake.set()
        return self._message

    def wake(self) -> None:
        """Have ``take`` return, be it with nothing."""
        self._wake.set()

    async def take(self) -> M | None:
        """All there is so far; waits for something, or for being woken."""
        await self._wake.wait()
        self._wake.clear()
        if self.empty:
            return None
        message, self._message, self._size = self._message, self._kind(), 0
        self._taken.set()
        return message

    async def room(self) -> None:
        """Wait while too much is unsent because the peer does not read."""
        while self._size >= _MOST_UNSENT:
            self._taken.clear()
            await self._taken.wait()


async def serve(
    context: Context, outbox: Outbox[Any], read: Coroutine[Any, Any, None], is_over: Callable[[], bool]
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
