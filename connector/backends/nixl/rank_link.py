"""The way to one rank of a peer: pieces of reads, from order to end. A Connection (connection.py) has one or several.

    waiting ──post──► in flight ──DONE────────────────────► ended
       │                  │                                   ▲
       │                  ├──Disconnected (endpoint dead)─────┤
       │                  └──any other error: in doubt ───────┤  the link is cut; ended once the endpoint is dead
       └──link lost (never posted)────────────────────────────┘

Until a piece has ended, its local blocks may still be written to: nothing but the end of a transfer fences it, not
releasing its handle and not removing the peer. So a piece in flight is polled to its end whatever happens, and a rank
that hangs is made to end by cutting its connections.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from connector.backends.nixl import ucx
from connector.backends.nixl.agent import Disconnected, NixlAgent, NixlTransfer
from connector.planning.block_slicing import BlockRanges
from connector.planning.rank_mapping import SourceRank
from connector.planning.transfer_plan import ReadChunk, plan_read
from pdserve.errors import PeerError
from pdserve.records import KVRead, KVRegion

logger = logging.getLogger(__name__)

# By the device that is read into. Copies between processes of a host happen while posting, so there a piece bounds how
# long one post keeps the thread from the others. A GPU copies by itself, and is to have enough to do between two polls.
PIECE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
PIECES_IN_FLIGHT = 4
GREETING_BYTES = 64
GRACE_SECONDS = 0.5  # for what is in flight when a link is given up


class Pull:
    """Pieces that make one read, by whichever links they go.

    ``on_end`` is told the first error, or "", when the last piece has ended: never earlier, whatever has failed.
    """

    def __init__(self, num_pieces: int, on_end: Callable[[str], None]) -> None:
        self._num_left = num_pieces
        self._on_end = on_end
        self._error = ""

    def fail(self, error: str) -> None:
        """What is read is of no use, but nothing has ended by that."""
        self._error = self._error or error

    def end_piece(self, error: str) -> None:
        self.fail(error)
        self._num_left -= 1
        if not self._num_left:
            self._on_end(self._error)


class _Flight:
    """A posted piece. ``in_doubt``: it failed, but the endpoint may live and bytes may still land."""

    def __init__(self, pull: Pull, transfer: NixlTransfer) -> None:
        self.pull = pull
        self.transfer = transfer
        self.in_doubt = False


class Home(NamedTuple):
    """What all links of a connector share."""

    agent: NixlAgent
    region: KVRegion
    scratch: int  # one prepared descriptor of GREETING_BYTES
    stall_seconds: float


class RankLink:
    """Used on the owner thread only.

    Raises PeerError when the rank cannot be connected to, or its memory is not what it says. ``on_broken`` is told why
    a link broke, once, unless it had been given up before. Errors begin with ``label``.
    """

    def __init__(self, home: Home, source: SourceRank, label: str, on_broken: Callable[[str], None]) -> None:
        self.lost = ""  # why, once no new piece is posted
        self._home = home
        self._rank = source.rank
        self._blocks = source.slices
        self._label = label
        self._on_broken = on_broken
        self._prepared: list[int] = []
        self._waiting: deque[tuple[Pull, ReadChunk]] = deque()
        self._flights: list[_Flight] = []
        self._lost_at = 0.0
        self._expected_at = 0.0  # when bytes are looked for
        self._received = -1
        self._looked_at = 0.0
        self._was_cut = False
        home.agent.add(self._rank.metadata)
        try:
            self._remote = self._prepare(self._rank.agent, self._rank.region, self._blocks.remote)
            self._remote_start = self._prepare(
                self._rank.agent, self._rank.region, BlockRanges.whole(GREETING_BYTES, 1)
            )
            self._local = self._prepare(None, home.region, self._blocks.local)
        except PeerError:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        return bool(self._flights or self._waiting)

    @property
    def drained(self) -> bool:
        """Nothing of this rank can land any more, nor will be posted."""
        return bool(self.lost) and not self._flights

    def greet(self, pull: Pull) -> None:
        """Read a few bytes, the one piece of ``pull`` on this link.

        The data path works when they have come, and UCX has done what it puts off until the first transfer. A GPU is
        not greeted: a read into host memory may take a path that no block ever takes.
        """
        if self.lost or self._rank.region.device != "cpu":
            pull.end_piece(self.lost)
            return
        only = np.zeros(1, np.int32)
        self._begin(pull, lambda: self._home.agent.read(self._home.scratch, only, self._remote_start, only))

    def plan(self, read: KVRead) -> list[ReadChunk]:
        """What ``read`` wants of this rank. Raises PeerError."""
        return plan_read(read, self._blocks, PIECE_BYTES[self._home.region.device])

    def submit(self, pull: Pull, pieces: list[ReadChunk]) -> None:
        """Queue pieces that ``plan`` has made; the link is not lost."""
        assert not self.lost
        self._waiting.extend((pull, piece) for piece in pieces)

    def advance(self) -> bool:
        """Post one piece, look after those in flight; True when anything moved."""
        moved = self._post_next()
        for flight in list(self._flights):
            moved |= self._look_after(flight)
        now = time.monotonic()
        if moved or now - self._looked_at > self._home.stall_seconds / 4:  # if so, it was us who stood still
            self._expect_bytes(now)
        elif self._flights and now > self._expected_at:
            self._look_for_bytes(now)
        self._looked_at = now
        if self._flights and self.lost and now - self._lost_at > GRACE_SECONDS:
            self._cut()
        return moved

    def give_up(self, reason: str) -> None:
        """Post nothing more. Pieces end with ``reason``: those that wait now, those in flight in their own time."""
        if self.lost:
            return
        self.lost, self._lost_at = reason, time.monotonic()
        while self._waiting:
            self._waiting.popleft()[0].end_piece(reason)

    def abandon(self) -> None:
        """Make what is in flight end now."""
        if self._flights:
            self._cut()

    def close(self) -> None:
        """Let the agent forget this rank; only once drained, or when the agent is destroyed right after."""
        while self._prepared:
            self._home.agent.release(self._prepared.pop())
        self._home.agent.remove(self._rank.agent)

    def _prepare(self, owner: str | None, region: KVRegion, side: BlockRanges) -> int:
        self._prepared.append(self._home.agent.prepare(owner, region, side))
        return self._prepared[-1]

    # ------------------------------------------------------------ stalls

    def _expect_bytes(self, now: float, since: int = -1) -> None:
        """From now on, beyond the first so many; -1: they have not been counted."""
        self._expected_at = now + self._home.stall_seconds / 2
        self._received = since

    def _look_for_bytes(self, now: float) -> None:
        """No piece has ended for half a stall. Over a slow network that is no stall as long as bytes arrive; other
        networks have no sockets, and are never that slow.
        """
        received = ucx.received_bytes(self._rank.metadata)
        if self._received == -1 or received > self._received:
            self._expect_bytes(now, received)
            return
        self._break(f"no byte arrived for {self._home.stall_seconds:g} s: the peer hangs or its network is cut")
        self._cut()

    # ------------------------------------------------------------ pieces

    def _break(self, reason: str) -> None:
        """Give up for a reason that nobody ordered, and tell."""
        if not self.lost:
            self.give_up(self._label + reason)
            self._on_broken(self.lost)

    def _post_next(self) -> bool:
        if not self._waiting or len(self._flights) >= PIECES_IN_FLIGHT:
            return False
        pull, piece = self._waiting.popleft()
        local, remote = self._blocks.local.descriptors(piece.local), self._blocks.remote.descriptors(piece.remote)
        self._begin(pull, lambda: self._home.agent.read(self._local, local, self._remote, remote))
        return True

    def _begin(self, pull: Pull, create: Callable[[], NixlTransfer]) -> None:
        try:
            flight = _Flight(pull, create())
        except PeerError as error:  # nothing was posted
            pull.end_piece(self._label + str(error))
            self._break(str(error))
            return
        if not self._flights:
            self._expect_bytes(time.monotonic())
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
            self._end_flight(flight, self._label + str(error))
            self._break(str(error))
            return True
        except PeerError as error:
            flight.in_doubt = True
            flight.pull.fail(self._label + str(error))
            self._break(str(error))
            self._cut()
            return False
        self._end_flight(flight, self.lost)
        return True

    def _end_flight(self, flight: _Flight, error: str) -> None:
        self._flights.remove(flight)
        flight.transfer.release()
        flight.pull.end_piece(error)

    def _cut(self) -> None:
        if self._was_cut:
            return
        self._was_cut = True
        count = ucx.shut_sockets(self._rank.metadata)
        logger.warning("%s: %s; shut %d of its connections down", self._rank.agent, self.lost, count)
