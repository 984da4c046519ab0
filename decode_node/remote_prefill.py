"""One prompt at a prefill node, seen from D."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from decode_node.handoff import Extended, Released
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import failure_from_pb

if TYPE_CHECKING:
    from decode_node.prefill_stream import PrefillStream

PrefillEvent = pb.FirstTokens | pb.SampledToken | pb.KVReady | Extended | Released | PdserveError


class Listener(Protocol):
    """Who is told what becomes of a prompt, in P's order."""

    def on_event(self, event: PrefillEvent) -> None:
        """An error says why P announces no more, if it has not announced all."""

    def fail(self, error: PdserveError) -> None:
        """Nothing more will be heard, and what has been read will not be confirmed."""


class RemotePrefill:
    """Asked for by ``PrefillStream.prefill``; ends with the answer to ``release``, or with ``give_up``.

    After ``give_up`` the listener is told nothing, and P gets back what it holds: a lease that P has not named yet is
    released as soon as it does.
    """

    def __init__(self, stream: PrefillStream, number: int, listener: Listener) -> None:
        self._stream = stream
        self._number = number
        self._listener: Listener | None = listener
        self._lease = 0  # 0: P has not named it
        self._asks = 0
        self._asked_at = 0.0  # when the latest extension was asked for
        self._releasing = False
        self._over = False  # P holds nothing for it, as far as it says
        self._timer: asyncio.TimerHandle | None = None  # of an answer that is due

    def extend(self) -> None:
        """Ask P to keep the lease; the answer is an event, as is that there was none."""
        self._asks += 1
        self._asked_at = time.monotonic()
        self._stream.send(
            pb.HandoffRequest(
                extend=pb.ExtendRequest(
                    request=self._number, epoch=self._stream.epoch, lease=self._lease, ask=self._asks
                )
            )
        )
        error = PeerError(f"{self._stream.peer} was asked to extend a lease and did not answer")
        self._expect(self._stream.timing.answer_timeout, lambda: self._tell(Extended(self._asked_at, 0.0, error)))

    def release(self) -> None:
        """Give the lease back; the answer is an event. Only if it stood may anything be used that was read."""
        self._releasing = True
        self._send_release()
        error = PeerError(f"{self._stream.peer} was asked whether a lease stood and did not answer")
        self._expect(self._stream.timing.timeout, lambda: self._fail(error))

    def give_up(self) -> None:
        """Whatever P does or holds for it is not wanted. Idempotent."""
        if self._listener is None:
            return
        self._listener = None
        self._stop_timer()
        if self._over:
            return
        if not self._lease:
            self._stream.send(pb.HandoffRequest(cancel=pb.Cancel(request=self._number)))
        else:
            self._give_back()

    def take(self, event: pb.PrefillEvent) -> None:
        """What P says of it."""
        match event.WhichOneof("kind"):
            case "accepted":
                self._named(event.accepted.lease)
            case "first_tokens":
                self._tell(event.first_tokens)
            case "next_token":
                self._tell(event.next_token)
            case "kv_ready":
                self._named(event.kv_ready.lease)
                self._tell(event.kv_ready)
            case "extended" if event.extended.ask == self._asks and not self._releasing:
                self._stop_timer()
                self._tell(Extended(self._asked_at, event.extended.lease_ms / 1000))
            case "released" if self._releasing:
                self._end()
                self._tell(Released(event.released.stood))
            case "finished":
                self._no_more()
                self._tell(PeerError(f"{self._stream.peer} ended a prompt without leasing its blocks"))
            case "failed":
                self._no_more()
                error = failure_from_pb(event.failed, self._stream.peer)
                if self._releasing:
                    self._fail(error)
                else:
                    self._tell(error)

    def stream_ended(self, error: PeerError) -> None:
        self._fail(error)

    def _no_more(self) -> None:
        """P announces nothing more: a lease that it has not named by now there is not."""
        if not self._lease:
            self._end()

    def _named(self, lease: int) -> None:
        if not self._lease:
            self._lease = lease
            if self._listener is None:
                self._give_back()

    def _give_back(self) -> None:
        self._send_release()
        self._end()

    def _send_release(self) -> None:
        release = pb.ReleaseRequest(request=self._number, epoch=self._stream.epoch, lease=self._lease)
        self._stream.send(pb.HandoffRequest(release=release))

    def _end(self) -> None:
        self._over = True
        self._stop_timer()
        self._stream.forget(self._number)

    def _tell(self, event: PrefillEvent) -> None:
        if self._listener is not None:
            self._listener.on_event(event)

    def _fail(self, error: PdserveError) -> None:
        if self._listener is not None:
            self._listener.fail(error)

    def _expect(self, seconds: float, otherwise: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, otherwise)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
