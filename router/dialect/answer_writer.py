"""AnswerWriter: the last step of an answer. HTTP and WebSockets have one each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from pdserve.errors import PdserveError
from router.dialect.events import Event
from router.gate.rate_limits import Headers


class AnswerWriter(Protocol):
    """Writes the answer to one request.

    A stream that has sent nothing for ``keep_alive`` seconds gets a sign of life; 0: it needs none.
    """

    keep_alive: float

    async def send_json(self, pieces: Iterator[bytes], headers: Headers, disconnected: Callable[[], bool]) -> None:
        """Send a whole answer, a piece per ``turn``. Raises ClientDisconnected once ``disconnected`` returns True."""

    async def begin_events(self, headers: Headers) -> None:
        """Begin a stream."""

    def send_events(self, events: Sequence[Event], last: bool) -> Awaitable[None]:
        """Send events as fast as the client reads; after the ``last`` ones the answer is complete."""

    async def send_sign_of_life(self, ping: Event | None) -> None:
        """Send ``ping``, or a comment, between the events of a stream."""

    async def send_error(self, error: PdserveError, request_id: str) -> None:
        """Send an error in place of an answer."""

    async def turn(self) -> None:
        """Wait until the next large piece may be encoded: one per turn of the event loop, of all answers."""
