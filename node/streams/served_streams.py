"""The serving end of long-lived streams, each of which carries all requests of one peer.

pdserve/rpc/multiplexed_stream.py is the other end. A peer numbers its requests; the node answers with batches of
entries that name these numbers.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from node.streams.stream_writer import Context, StreamWriter
from pdserve.errors import RequestError
from pdserve.logs import LimitedWarnings
from pdserve.rpc.errors import abort

_log = logging.getLogger(__name__)
_log.addFilter(LimitedWarnings())  # a hostile peer may open streams without end


class Violations:
    """Protocol violations at one node since its start. ``count`` is exported as a metric."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, peer: str, error: RequestError) -> None:
        """Count a stream of ``peer``, a network address, that ``error`` ended."""
        self.count += 1
        _log.warning("the stream of %s broke the protocol and was ended: %s", peer, error)


class PeerMessage(Protocol):
    """A message to the peer."""

    draining: bool


M = TypeVar("M")  # a message from the peer
B = TypeVar("B", bound=PeerMessage)


class ServedStream(ABC, Generic[M, B]):
    """The stream of one peer. Each entry is in ``writer`` when the callback that causes it returns."""

    def __init__(self, batch: Callable[[], B]) -> None:
        self.writer = StreamWriter(batch)
        self._largest = -1  # the peer's largest number of a request so far

    @abstractmethod
    async def read(self, requests: AsyncIterable[M]) -> None:
        """Handle messages until the peer ends the stream. Raises RequestError for a protocol violation."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether the call may end now that the peer has ended its side."""

    @abstractmethod
    def close(self) -> None:
        """Cancel all requests, as the stream has ended."""

    def add_number(self, number: int) -> None:
        """Note the number of a new request."""
        self._largest = max(self._largest, number)

    def check_number(self, number: int) -> None:
        """Raise RequestError unless a request with this number was sent on this stream."""
        if number > self._largest:
            raise RequestError(f"request {number} was never sent on this stream; only its own stream can change it")


S = TypeVar("S", bound=ServedStream[Any, Any])


class ServedStreams(Generic[S]):
    """The open streams of a service. Each receives one ``draining`` message."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations
        self._draining = False
        self._open: list[S] = []
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[S]:
        return iter(tuple(self._open))

    async def serve(self, stream: S, requests: AsyncIterable[Any], context: Context) -> None:
        """Serve a call: send the messages of ``stream.writer`` until the peer has ended its side and ``stream.idle``.

        An exception of ``stream.read`` ends the call at once; a RequestError is a violation of the protocol, and
        becomes the call's status message.
        """
        self._open.append(stream)
        if self._draining:
            stream.writer.put().draining = True
        reader = asyncio.create_task(stream.read(requests), name="stream reader")
        reader.add_done_callback(lambda _: stream.writer.wake())
        try:
            while not (reader.done() and (stream.idle or reader.exception())):
                message = await stream.writer.take()
                if message is not None:
                    await context.write(message)
            reader.result()
        except RequestError as exc:
            self._violations.add(context.peer(), exc)
            await abort(context, exc)
        finally:
            reader.cancel()
            stream.close()
            self._open.remove(stream)
            self.changed()

    def drain(self) -> None:
        """Send ``draining`` on every stream. Idempotent."""
        if not self._draining:
            self._draining = True
            for stream in self:
                stream.writer.put().draining = True

    def reopen(self) -> None:
        """Accept requests again, on new streams: peers end the drained ones."""
        self._draining = False

    def changed(self) -> None:
        """Have ``until`` check its condition again."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is checked after every call of ``changed``."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def ended(self) -> None:
        await self.until(lambda: not self._open)
