"""One long-lived bidirectional call to a node, which carries all requests of this process to it.

    open ──the node drains──► draining: no new request ──the last request has ended──► half-closed ──┐
      │                          │                                                                   ▼
      └──────────────────────────┴── the node ends it, the connection breaks, ``close`` ───────────► ended

A stream belongs to one connection and never comes back: its owner, which watches the node, opens another one. gRPC's
keepalive (pdserve/rpc/channel.py) ends the streams to a host that is dead or hangs.

A message waits until the node reads it (gRPC's flow control). Beyond ``MAX_UNSENT`` bytes the stream takes no new
request; only short messages about requests in flight are added then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pdserve.errors import Draining, Overloaded, PdserveError, PeerError, RequestError
from pdserve.rpc.errors import rpc_reason
from pdserve.rpc.field_ranges import check_answer
from pdserve.rpc.message_limits import MAX_ENTRIES

_log = logging.getLogger(__name__)

MAX_UNSENT = 64 << 20  # bytes that may wait for the node to read; at half of it the stream takes new requests again
_MESSAGE_BYTES = 256  # a queued message takes at least so much memory
_ENTRIES_AT_ONCE = 64  # about five milliseconds with log-probabilities


class Entry(Protocol):
    """An event of one request, in a message of the node."""

    request: int


class NodeMessage(Protocol):
    """A message of the node, with the events of many requests."""

    draining: bool  # the node refuses requests from now on


M = TypeVar("M", bound=Message)  # sent to the node
B = TypeVar("B", bound=NodeMessage)
E = TypeVar("E", bound=Entry)
H = TypeVar("H")  # handles the entries of a request


class MultiplexedStream(ABC, Generic[M, B, E, H]):
    """Open from construction until ``close`` or until the node ends it; then every request on it has failed.

    ``on_change`` is called whenever ``open`` changes. Handlers are called on the event loop; they neither block nor
    raise.
    """

    def __init__(
        self,
        serve: Callable[[AsyncIterator[M]], grpc.aio.StreamStreamCall[M, B]],
        *,
        node: str,
        max_request: int,
        linger: float,
        on_change: Callable[[], None],
    ) -> None:
        """``serve`` makes the call. ``node`` names the peer in errors; it accepts messages of ``max_request`` bytes.

        The call is cancelled ``linger`` seconds after ``close``, so that the node receives the waiting messages.
        """
        self.draining = False  # the node takes no new request
        self.end_reason = ""  # empty until the end
        self._node = node
        self._max_request = max_request
        self._linger = linger
        self._on_change = on_change
        self._handlers: dict[int, H] = {}
        self._numbers = itertools.count(1)
        self._unsent: asyncio.Queue[M | None] = asyncio.Queue()  # None: no message follows
        self._unsent_bytes = 0
        self._full = False
        self._call = serve(self._messages())
        self._reader = asyncio.create_task(self._read(), name=f"stream of {node}")

    # ------------------------------------------------------------ differences between streams

    @abstractmethod
    def _entries(self, batch: B) -> Sequence[E]:
        """Return the entries of a message in the order in which they are delivered."""

    @abstractmethod
    def _deliver(self, handler: H, entry: E) -> None:
        """Pass an entry on."""

    @abstractmethod
    def _fail(self, handler: H, error: PdserveError) -> None:
        """Tell a request that the stream has ended."""

    @abstractmethod
    def _end_error(self, reason: str) -> PdserveError:
        """Return the error of requests that the end of the stream fails."""

    # ------------------------------------------------------------ state

    @property
    def ended(self) -> bool:
        return bool(self.end_reason)

    @property
    def open(self) -> bool:
        """Whether the stream takes new requests."""
        return not (self.ended or self.draining or self._full)

    @property
    def idle(self) -> bool:
        return not self._handlers

    def drain(self) -> None:
        """Send no new request; end with the last one. Idempotent."""
        if not self.draining:
            self.draining = True
            self._on_change()
            self._end_if_drained()

    def close(self, reason: str) -> None:
        """End the stream and fail its requests; their last messages leave within ``linger``. Idempotent."""
        if self.ended:
            return
        self.end_reason = reason
        asyncio.get_running_loop().call_later(self._linger, self._call.cancel)
        handlers = self._handlers
        self._handlers = {}
        for handler in handlers.values():
            self._fail(handler, self._end_error(reason))
        self._unsent.put_nowait(None)
        self._on_change()

    def forget(self, number: int) -> None:
        """Drop a request that has ended. Idempotent."""
        self._handlers.pop(number, None)
        self._end_if_drained()

    async def closed(self, seconds: float) -> None:
        """Wait until the node has ended the call after ``close``, at most ``seconds``."""
        await asyncio.wait([self._reader], timeout=seconds)

    # ------------------------------------------------------------ requests

    def _check_open(self) -> None:
        """Raise Draining, ``_end_error`` or Overloaded unless the stream takes a new request."""
        if self.draining:
            raise Draining(f"{self._node} is draining")
        if self.ended:
            raise self._end_error(self.end_reason)
        if self._full:
            text = f"{self._node} does not read its requests; {self._unsent_bytes} bytes wait; try again later"
            raise Overloaded(text)

    def _begin(self, number: int, handler: H, messages: Sequence[M]) -> None:
        """Send a request. Raises RequestError beyond the node's limit."""
        if (size := max(message.ByteSize() for message in messages)) > self._max_request:
            text = f"the request takes {size} bytes, {self._node} takes {self._max_request} at most"
            raise RequestError(f"{text}; shorten its prompt")
        self._handlers[number] = handler
        for message in messages:
            self._send(message)

    def _send(self, message: M) -> None:
        """Queue a message; it is lost if the stream has ended."""
        self._unsent.put_nowait(message)
        self._unsent_bytes += message.ByteSize() + _MESSAGE_BYTES
        if self._unsent_bytes > MAX_UNSENT and not self._full:
            self._full = True
            _log.warning("%s does not read its requests; it gets no new ones until it does", self._node)
            self._on_change()

    def _end_if_drained(self) -> None:
        """Half-close the stream of a draining node without requests, so that the node can exit."""
        if self.draining and self.idle:
            self._unsent.put_nowait(None)

    # ------------------------------------------------------------ the call

    async def _messages(self) -> AsyncIterator[M]:
        while (message := await self._unsent.get()) is not None:
            yield message
            # gRPC asks for the next message when the transport has taken this one
            self._unsent_bytes -= message.ByteSize() + _MESSAGE_BYTES
            if self._full and self._unsent_bytes <= MAX_UNSENT // 2:
                self._full = False
                self._on_change()

    async def _read(self) -> None:
        reason = ""
        try:
            async for batch in self._call:
                if batch.draining:
                    self.drain()
                entries = self._entries(batch)
                if len(entries) > MAX_ENTRIES:
                    reason = f"it sent {len(entries)} events in a message, the limit is {MAX_ENTRIES}"
                    break
                for start in range(0, len(entries), _ENTRIES_AT_ONCE):
                    if start:
                        await asyncio.sleep(0)  # a step may have a thousand outputs, each with 20 log-probabilities
                    for entry in entries[start : start + _ENTRIES_AT_ONCE]:
                        handler = self._handlers.get(entry.request)
                        if handler is not None:  # else the entry was under way when the request ended
                            check_answer(entry)  # type: ignore[arg-type]  # a message, which no Protocol can say
                            self._deliver(handler, entry)
                handler = None  # a request that has ended may hold images
        except grpc.aio.AioRpcError as exc:
            reason = rpc_reason(exc)
        except PeerError as exc:
            reason = str(exc)
        except Exception:  # a bug; unread, the stream would hold its requests for ever
            _log.exception("messages of %s could not be handled", self._node)
            reason = "its messages could not be handled"
        finally:  # also when the channel was closed, which cancels its calls
            self.close(reason or ("it is draining" if self.draining else "it ended the stream"))
