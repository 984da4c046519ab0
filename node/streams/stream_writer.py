"""Batches the outgoing entries of a long-lived gRPC stream into as few messages as possible."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from pdserve.rpc.message_limits import BATCH_LIMIT, ENTRY_BYTES

M = TypeVar("M")

_MOST_UNSENT = 4096  # entries; beyond it, messages that would produce more are not read

Context = grpc.aio.ServicerContext[Any, Any]


class StreamWriter(Generic[M]):
    """Collects entries into the next message while gRPC's flow control delays the one before.

    Entries beyond the size of a message go into further ones.
    """

    def __init__(self, kind: Callable[[], M]) -> None:
        self._kind = kind
        self._messages = deque([kind()])  # unsent, oldest first; entries are added to the last one
        self._size = 0  # entries
        self._bytes = 0  # upper bound of the last message's size
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()

    @property
    def empty(self) -> bool:
        return not self._size

    def put(self, num_bytes: int = 0) -> M:
        """Return the last unsent message, to add one entry to at once; ``num_bytes``: size of its long fields."""
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
        self._size = 0
        self._bytes = 0
        self._sent.set()
        return message

    async def room(self) -> None:
        """Wait while too many entries are unsent because the peer does not read."""
        while self._size >= _MOST_UNSENT:
            self._sent.clear()
            await self._sent.wait()
