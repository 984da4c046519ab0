"""Transfers from one rank of a peer, from their post to their end. KV reads and the weight reader use them.

    post ──► in flight ──DONE────────────────────► ended
                │                                    ▲
                ├──Disconnected (endpoint dead)──────┤
                └──any other error: in doubt ────────┘  sockets are shut; ended once the endpoint is dead

Until a transfer has ended, its local memory may still be written to: neither releasing its handle nor removing the peer
stops it. So each one is polled to its end, and a hung rank is made to end by shutting its sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from connector.backends.nixl.agent import Disconnected, NixlAgent, NixlTransfer
from connector.backends.nixl.ucx_sockets import PeerSockets
from pdserve.errors import PeerError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 0.5  # for transfers in flight once the rank has failed or is given up


class _InFlight:
    """``error``: it failed and is in doubt, as the endpoint may live and bytes may still land."""

    def __init__(self, transfer: NixlTransfer, on_end: Callable[[str], None]) -> None:
        self.transfer = transfer
        self.on_end = on_end
        self.error = ""


class Transfers:
    """Used on one thread. ``failed`` gets the reason of a failure, once, unless ``fail`` came before.

    Errors begin with ``prefix``. ``stall_timeout`` is in seconds.
    """

    def __init__(
        self,
        agent: NixlAgent,
        peer: str,
        metadata: bytes,
        *,
        stall_timeout: float,
        prefix: str = "",
        failed: Callable[[str], None],
    ) -> None:
        """``peer`` and ``metadata`` are the rank's; the agent has not added them yet."""
        self.failure = ""  # reason, once the rank has failed or is given up
        self._peer = peer
        self._stall_timeout = stall_timeout
        self._prefix = prefix
        self._failed = failed
        self._in_flight: list[_InFlight] = []
        self._failed_at = 0.0
        self._stall_check_at = 0.0
        self._received_bytes = -1  # at the last stall check; -1: not counted
        self._polled_at = 0.0
        self._sockets = PeerSockets(agent.metadata(), metadata)
        self._sockets_shut = False

    def __len__(self) -> int:
        """Transfers in flight."""
        return len(self._in_flight)

    def post(self, create: Callable[[], NixlTransfer], on_end: Callable[[str], None]) -> None:
        """Start a transfer. ``on_end`` gets its error, or "", when it has ended, which may be at once."""
        try:
            transfer = _InFlight(create(), on_end)
        except PeerError as error:  # nothing was posted
            on_end(self._prefix + str(error))
            self._report(str(error))
            return
        self._restart_stall_check(time.monotonic())
        self._in_flight.append(transfer)
        self._step(transfer, post=True)

    def poll(self) -> bool:
        """Return whether a transfer has ended."""
        moved = False
        for transfer in list(self._in_flight):
            # A transfer in doubt is posted again, into memory that it still owns: it fails once the endpoint is dead.
            moved |= self._step(transfer, post=bool(transfer.error))
        now = time.monotonic()
        if moved or now - self._polled_at > self._stall_timeout / 4:  # then this thread stood still
            self._restart_stall_check(now)
        elif self._in_flight and now > self._stall_check_at:
            self._check_stall(now)
        self._polled_at = now
        if self._in_flight and self.failure and now - self._failed_at > GRACE_SECONDS:
            self.shut_sockets()
        return moved

    def fail(self, reason: str) -> None:
        """Give the rank up. Transfers in flight go on for GRACE_SECONDS."""
        if not self.failure:
            self.failure = reason
            self._failed_at = time.monotonic()

    def shut_sockets(self) -> None:
        """Make the transfers in flight end now."""
        if self._sockets_shut or not self._in_flight:
            return
        self._sockets_shut = True
        count = self._sockets.shut()
        logger.warning("%s: %s; shut %d of its connections down", self._peer, self.failure, count)

    def _restart_stall_check(self, now: float, received_bytes: int = -1) -> None:
        self._stall_check_at = now + self._stall_timeout / 2
        self._received_bytes = received_bytes

    def _check_stall(self, now: float) -> None:
        """No transfer has ended for half a stall timeout. That is no stall while bytes arrive over TCP sockets.

        Other networks have no sockets, and are never that slow.
        """
        received = self._sockets.received_bytes()
        if self._received_bytes == -1 or received > self._received_bytes:
            self._restart_stall_check(now, received)
            return
        self._report(f"no byte arrived for {self._stall_timeout:g} s: the peer hangs or its network is cut")
        self.shut_sockets()

    def _report(self, reason: str) -> None:
        if not self.failure:
            self.fail(self._prefix + reason)
            self._failed(self.failure)

    def _step(self, transfer: _InFlight, post: bool) -> bool:
        """Post or poll a transfer. Return whether it has ended."""
        try:
            done = transfer.transfer.post() if post else transfer.transfer.done()
        except Disconnected as error:
            self._end(transfer, transfer.error or self._prefix + str(error))
            self._report(str(error))
            return True
        except PeerError as error:
            transfer.error = transfer.error or self._prefix + str(error)
            self._report(str(error))
            self.shut_sockets()
            return False
        if not done or transfer.error:
            return False
        self._end(transfer, self.failure)
        return True

    def _end(self, transfer: _InFlight, error: str) -> None:
        self._in_flight.remove(transfer)
        transfer.transfer.release()
        transfer.on_end(error)
