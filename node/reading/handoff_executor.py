"""Executes the actions of a handoff or pull: messages to the peer, orders to the engine, and the timer of its clock."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from node.context import NodeContext
from node.reading.handoff import Action, Event, Handoff, HandoffFailed, ReadFailed
from node.reading.peer import KVPeer
from node.reading.peer_stream import PeerStream
from pdserve.errors import PdserveError, PeerError
from pdserve.ipc.messages import KVConfirmed, ReadChecked, ReadEnded, Reserved, StartRead
from pdserve.pb import pdserve_pb2 as pb

T = TypeVar("T")

HandoffEvent = Reserved | ReadEnded | ReadChecked


class HandoffExecutor(ABC):
    """Base of the drivers. The callback that brings the reason for an action takes the action.

    A driver begins with the engine's first event, and ends once: confirmed, failed or abandoned. Later events change
    nothing.
    """

    def __init__(self, node: NodeContext, peer: KVPeer, rid: int) -> None:
        """``rid`` is the engine's id of the prompt that ``peer`` has KV of, or computes."""
        self._node = node
        self._engine = node.engine
        self._peer = peer
        self._rid = rid
        self._ended = False
        self._handoff: Handoff | None = None
        self._stream: PeerStream | None = None  # the handoff's stream to the peer
        self._timer: asyncio.TimerHandle | None = None

    def on_engine_event(self, event: HandoffEvent) -> None:
        if isinstance(event, Reserved):
            self._guard(self._start, event.cached_tokens)
        else:
            self.on_event(event)

    def on_event(self, event: Event) -> None:
        """Advance the handoff. None: time has passed."""
        self._guard(self._advance, event)

    def abandon(self) -> None:
        """End the handoff, as its prompt has ended, and have the peer free what it holds. Idempotent."""
        if not self._ended:
            self._ended = True
            self._give_up()

    # ------------------------------------------------------------ parts of a driver

    @abstractmethod
    def _start(self, cached_tokens: int) -> None:
        """Blocks are reserved, and this node has KV of the first ``cached_tokens`` tokens: ask the peer, or do not."""

    def _advance(self, event: Event) -> None:
        handoff = self._handoff
        assert handoff is not None, "events follow the prompt that is sent to the peer"
        self._execute(handoff, handoff.on(event, time.monotonic()))

    @abstractmethod
    def _confirm(self, confirmed: KVConfirmed) -> None:
        """Have the engine use the KV that it has read."""

    @abstractmethod
    def _fail(self, error: PdserveError) -> None:
        """End the handoff with an error, and have the prompt go on without it, or end. Called before the end only."""

    @abstractmethod
    def _on_exception(self, error: Exception) -> None:
        """End the handoff after a bug, whose traceback is that of the exception being handled."""

    # ------------------------------------------------------------ helpers

    def _guard(self, step: Callable[[T], None], value: T) -> None:
        """Run a step. Its error ends this handoff, not the stream that carries others, too."""
        if self._ended:
            return
        try:
            try:
                step(value)
            except PdserveError as exc:
                if not self._ended:
                    self._fail(exc)
        except Exception as exc:
            self._on_exception(exc)

    def _open_stream(self) -> PeerStream:
        """Return the peer's stream for this handoff. Raises PeerError if the peer was lost."""
        stream = self._stream = self._peer.stream
        if stream is None:
            raise PeerError(f"{self._peer.address} was lost while the request waited for KV blocks")
        return stream

    def _begin(self, request: pb.PrefillRequest, present: int, num_tokens: int, *, patience: float = inf) -> None:
        """Send the prompt: the peer announces KV of ``num_tokens`` tokens, without the first ``present`` tokens.

        A pull is late after ``patience`` seconds. Raises PdserveError when the prompt cannot be sent.
        """
        stream = self._stream
        assert stream is not None, "a handoff has a stream"
        request.skip_tokens = present
        request.kv_layers = self._node.config.kv_layers_with(stream.peer.other_drafts)
        now = time.monotonic()
        number = stream.prefill(request, self.on_event)
        self._handoff = Handoff(
            self._rid,
            number,
            num_tokens,
            peer=stream.peer,
            timing=self._node.config.options.peer_timing,
            sent_at=now,
            pull=request.cached_only,
            due=now + patience,
        )
        self._wake_at(self._handoff.wake_at)

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

    def _give_up(self) -> None:
        if self._handoff is not None:
            self._execute(self._handoff, self._handoff.give_up())

    def _check_peer(self, error: PdserveError) -> None:
        """Have the connection checked, or made again, if the error may be its own."""
        if isinstance(error, ReadFailed):
            self._peer.reset(str(error))
        elif isinstance(error, PeerError):
            self._peer.check()

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
            delay = max(0.0, when - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self.on_event, None)
