"""Executes the actions of a handoff: messages to the peer, orders to the engine, and the timer of its clock."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

from node.engine_client import EngineClient
from node.reading.handoff import Action, Event, Handoff, HandoffFailed
from node.reading.peer_stream import PeerStream
from pdserve.ipc.messages import KVConfirmed, StartRead


class HandoffExecutor(ABC):
    """Base of handoff drivers. The callback that brings the reason for an action takes the action."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._handoff: Handoff | None = None
        self._stream: PeerStream | None = None  # the handoff's stream to the peer
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Advance the handoff. None: time has passed."""

    def _execute(self, handoff: Handoff, actions: Sequence[Action]) -> None:
        """Take the actions. Raises PdserveError for HandoffFailed."""
        stream = self._stream
        assert stream is not None, "a handoff has a stream"
        failure = None
        for action in actions:
            match action:
                case HandoffFailed(error):
                    failure = error
                case StartRead():
                    self._start_read(action)
                case KVConfirmed():
                    self._confirm(action)
                case _:
                    stream.send(action)
        self._wake_at(handoff.wake_at)
        if not handoff.active:
            stream.forget(handoff.number)
        if failure is not None:
            raise failure

    def _start_read(self, order: StartRead) -> None:
        self._engine.send(order)

    @abstractmethod
    def _confirm(self, confirmed: KVConfirmed) -> None:
        """Have the engine use the KV that it has read."""

    @property
    def _seconds(self) -> float:
        """Seconds since the prompt was sent to the peer; 0 before that."""
        return 0.0 if self._handoff is None else time.monotonic() - self._handoff.sent_at

    def _wake_at(self, when: float) -> None:
        """Set the timer, whose event is None, to a time of ``time.monotonic``; infinity stops it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < inf:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, when - time.monotonic()), self.on_event, None
            )  # no event: time has passed
