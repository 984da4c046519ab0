"""A connected peer: the reads from it, in pieces, from order to end.

    waiting ──post──► in flight ──DONE────────────────────► ended
       │                  │                                   ▲
       │                  ├──Disconnected (endpoint dead)─────┤
       │                  └──any other error: in doubt ───────┤  the link is cut; ended once the endpoint is dead
       └──link lost (never posted)────────────────────────────┘

A read is reported when all its pieces have ended. Until then its local blocks may still be written to: nothing but
the end of a transfer fences it, not releasing its handle and not removing the peer. So a piece in flight is polled to
its end whatever happens, and a peer that hangs is made to end by cutting its connections.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from connector import transport, ucx
from connector.bridge import Source
from connector.cut import Side
from connector.nixl import Agent, Disconnected, Transfer
from connector.outbox import Outbox
from connector.plan import Piece, plan_read
from connector.traffic import Traffic
from pdserve.errors import PeerError
from pdserve.records import KVRead, KVRegion, Peer, ReadResult
from pdserve.transports import Connected

logger = logging.getLogger(__name__)

# By the device that is read into. Copies between processes of a host happen while posting, so there a piece bounds how
# long one post keeps the thread from the others. A GPU copies by itself, and is to have enough to do between two polls.
PIECE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
PIECES_IN_FLIGHT = 4
GREETING_BYTES = 64
GRACE_SECONDS = 0.5  # for what is in flight when a link is given up


class _Pull:
    """A read under way; without an order it is the greeting that shows a new link to work."""

    def __init__(self, read: KVRead | None, pieces: list[Piece], num_bytes: int) -> None:
        self.read = read
        self.pieces_left = len(pieces)
        self.num_bytes = num_bytes
        self.num_descriptors = sum(piece.num_runs for piece in pieces)
        self.error = ""


class _Flight:
    """A posted piece. ``in_doubt``: it failed, but the endpoint may live and bytes may still land."""

    def __init__(self, pull: _Pull, transfer: Transfer) -> None:
        self.pull = pull
        self.transfer = transfer
        self.in_doubt = False


class Home(NamedTuple):
    """What all links of a connector share."""

    agent: Agent
    region: KVRegion
    scratch: int  # one prepared descriptor of GREETING_BYTES
    outbox: Outbox
    stall_seconds: float


class Link:
    """Used on the owner thread only. Raises PeerError when the peer's memory is not what it says.

    The outbox learns that the link is connected once a first small read has succeeded: the data path works then, and
    UCX has done what it puts off until the first transfer.
    """

    def __init__(self, home: Home, peer: Peer, source: Source, lanes: str) -> None:
        devices = home.region.device, source.rank.region.device
        kind = transport.kind_of(lanes, "cuda" if "cuda" in devices else "cpu")
        self.connection = Connected(peer.epoch, kind, lanes)
        self.ready = False
        self.lost = ""  # why, once no new piece is posted
        self.lost_at = 0.0
        self._name = f"{peer.node_id} (epoch {peer.epoch})"
        self._home = home
        self._rank = source.rank
        self._blocks = source.cut
        self._remote = home.agent.prepare(self._rank.agent, self._rank.region, self._blocks.remote)
        self._remote_start = home.agent.prepare(self._rank.agent, self._rank.region, Side.whole(GREETING_BYTES, 1))
        self._local = home.agent.prepare(None, home.region, self._blocks.local)
        self._traffic = Traffic()
        self._waiting: deque[tuple[_Pull, Piece]] = deque()
        self._flights: list[_Flight] = []
        self._moved_at = 0.0
        self._looked_at = 0.0
        self._was_cut = False
        self._greet()

    @property
    def busy(self) -> bool:
        return bool(self._flights or self._waiting)

    @property
    def drained(self) -> bool:
        """Nothing of this peer can land any more, nor will be posted."""
        return bool(self.lost) and not self._flights

    def submit(self, read: KVRead, ordered_at: float) -> None:
        """Queue a read; one that cannot be done ends at once. Its time counts from ``ordered_at``."""
        try:
            if self.lost:
                raise PeerError(self.lost)
            pieces = plan_read(read, self._blocks, PIECE_BYTES[self._home.region.device])
        except PeerError as error:
            self._home.outbox.refused(read, f"{self._name}: {error}")
            return
        pull = _Pull(read, pieces, len(read.local_blocks) * self._blocks.num_bytes)
        self._traffic.begin(ordered_at)
        if not pieces:
            self._report(pull)
        self._waiting.extend((pull, piece) for piece in pieces)

    def advance(self) -> bool:
        """Post one piece, look after those in flight; True when anything moved."""
        moved = self._post_next()
        for flight in list(self._flights):
            moved |= self._look_after(flight)
        now = time.monotonic()
        if moved or now - self._looked_at > self._home.stall_seconds / 4:  # if so, it was us who stood still
            self._moved_at = now
        elif self._flights and now - self._moved_at > self._home.stall_seconds:
            self._break(f"no byte arrived for {self._home.stall_seconds:g} s: the peer hangs or its network is cut")
            self._cut()
        self._looked_at = now
        if self._flights and self.lost and now - self.lost_at > GRACE_SECONDS:
            self._cut()
        return moved

    def give_up(self, reason: str) -> None:
        """Post nothing more. Reads end with ``reason`` as soon as nothing of theirs is in flight."""
        if self.lost:
            return
        self.lost, self.lost_at = reason, time.monotonic()
        while self._waiting:
            self._end_piece(self._waiting.popleft()[0], reason)

    def abandon(self) -> None:
        """Make what is in flight end now."""
        if self._flights:
            self._cut()

    def close(self) -> None:
        """Let the agent forget this peer; only once drained, or when the agent is destroyed right after."""
        logger.info("connection to %s closed (%s): %s", self._name, self.lost or "node stopped", self._traffic)
        self._home.agent.release(self._remote)
        self._home.agent.release(self._remote_start)
        self._home.agent.release(self._local)
        self._home.agent.remove(self._rank.agent)

    # ------------------------------------------------------------ pieces

    def _break(self, reason: str) -> None:
        """Give up for a reason that nobody ordered, and tell."""
        if not self.lost:
            self.give_up(reason)
            self._home.outbox.failed(self.connection.epoch, f"{self._name}: {reason}")

    def _greet(self) -> None:
        if self._rank.region.device != "cpu":  # a read into host memory may take a path that no block ever takes
            self._report(_Pull(None, [], 0))
            return
        only = np.zeros(1, np.int32)
        transfer = self._home.agent.read(self._home.scratch, only, self._remote_start, only)
        self._begin(_Flight(_Pull(None, [Piece(only, only, 1)], GREETING_BYTES), transfer))

    def _post_next(self) -> bool:
        if not self._waiting or len(self._flights) >= PIECES_IN_FLIGHT:
            return False
        pull, piece = self._waiting.popleft()
        try:
            local, remote = self._blocks.local.descriptors(piece.local), self._blocks.remote.descriptors(piece.remote)
            transfer = self._home.agent.read(self._local, local, self._remote, remote)
        except PeerError as error:  # nothing was posted
            self._end_piece(pull, str(error))
            self._break(str(error))
            return True
        self._begin(_Flight(pull, transfer))
        return True

    def _begin(self, flight: _Flight) -> None:
        if not self._flights:
            self._moved_at = time.monotonic()
        self._flights.append(flight)
        self._step(flight, post=True)

    def _look_after(self, flight: _Flight) -> bool:
        # A piece in doubt is posted again, into blocks that are still its own: it fails once the endpoint is dead.
        return self._step(flight, post=flight.in_doubt)

    def _step(self, flight: _Flight, post: bool) -> bool:
        """True when the piece has ended."""
        try:
            if not (flight.transfer.post() if post else flight.transfer.done()) or flight.in_doubt:
                return False
        except Disconnected as error:
            self._end_flight(flight, str(error))
            self._break(str(error))
            return True
        except PeerError as error:
            flight.in_doubt = True
            flight.pull.error = flight.pull.error or str(error)
            self._break(str(error))
            self._cut()
            return False
        self._end_flight(flight, self.lost)
        return True

    def _end_flight(self, flight: _Flight, error: str) -> None:
        self._flights.remove(flight)
        flight.transfer.release()
        self._end_piece(flight.pull, error)

    def _end_piece(self, pull: _Pull, error: str) -> None:
        pull.error = pull.error or error
        pull.pieces_left -= 1
        if not pull.pieces_left:
            self._report(pull)

    def _report(self, pull: _Pull) -> None:
        if pull.read is None:
            if not pull.error:  # else the link broke, and that was told
                self._tell_connected()
            return
        if pull.error:
            seconds = self._traffic.end(0, 0, failed=True)
            result = ReadResult(pull.read.read_id, f"{self._name}: {pull.error}", seconds=seconds)
            self._home.outbox.ended(result, pull.read.local_blocks)
            return
        seconds = self._traffic.end(pull.num_bytes, pull.num_descriptors, failed=False)
        self._home.outbox.ended(ReadResult(pull.read.read_id, "", pull.num_bytes, pull.num_descriptors, seconds))
        if self._traffic.num_reads == 1 and self.connection.transport == "tcp":
            logger.warning(
                "KV of %s comes over TCP, at %.2f GB/s; check UCX_TLS and UCX_NET_DEVICES, or refuse that with "
                "--require-transport (UCX lanes: %s)",
                *(self._name, self._traffic.rate, self.connection.lanes),
            )

    def _tell_connected(self) -> None:
        self.ready = True
        ucx.log().pass_on()
        logger.info(
            "connected to %s over %s, ranges of bytes per block: %d (UCX lanes: %s)",
            *(self._name, self.connection.transport, self._blocks.num_ranges),
            self.connection.lanes or "unknown, its log is not ours",
        )
        self._home.outbox.connected(self.connection)

    def _cut(self) -> None:
        if self._was_cut:
            return
        self._was_cut = True
        count = ucx.shut_sockets(self._rank.metadata)
        logger.warning("%s: %s; shut %d of its connections down", self._name, self.lost, count)
