"""Connection to one rank of a peer: chunks of reads, from order to end. A PeerConnection has one or several.

    waiting ──post──► in flight ──DONE────────────────────► ended
       │                  │                                   ▲
       │                  ├──Disconnected (endpoint dead)─────┤
       │                  └──any other error: in doubt ───────┤  sockets are shut; ended once the endpoint is dead
       └──connection failed (never posted)────────────────────┘

Until a chunk has ended, its local blocks may still be written to: neither releasing its handle nor removing the peer
stops a transfer. So each chunk in flight is polled to its end, and a hung rank is made to end by shutting its sockets.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from connector.backends.nixl.agent import Disconnected, NixlAgent, NixlTransfer
from connector.backends.nixl.ucx_sockets import PeerSockets
from connector.planning.block_slicing import BlockRanges
from connector.planning.rank_mapping import SourceRank
from connector.planning.transfer_plan import ReadChunk, plan_read
from pdserve.errors import PeerError
from pdserve.records import KVRead, KVRegion

logger = logging.getLogger(__name__)

# By target device. Copies between processes of a host happen inside the post, so a chunk bounds how long a post blocks
# the owner thread. A GPU copies by itself and needs enough work between two polls.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
CHUNKS_IN_FLIGHT = 4
TEST_READ_BYTES = 64
GRACE_SECONDS = 0.5  # for chunks in flight when a connection is given up


class PendingRead:
    """The chunks of one read, over all connections that they use.

    ``on_end`` gets the first error, or "", when the last chunk has ended: never earlier, whatever has failed.
    """

    def __init__(self, num_chunks: int, on_end: Callable[[str], None]) -> None:
        self._num_left = num_chunks
        self._on_end = on_end
        self._error = ""

    def fail(self, error: str) -> None:
        """Record an error. Chunks in flight go on."""
        self._error = self._error or error

    def end_chunk(self, error: str) -> None:
        self.fail(error)
        self._num_left -= 1
        if not self._num_left:
            self._on_end(self._error)


class _PostedChunk:
    """``in_doubt``: it failed, but the endpoint may live and bytes may still land."""

    def __init__(self, read: PendingRead, transfer: NixlTransfer) -> None:
        self.read = read
        self.transfer = transfer
        self.in_doubt = False


class TransferContext(NamedTuple):
    agent: NixlAgent
    region: KVRegion
    scratch: int  # one prepared descriptor of TEST_READ_BYTES
    stall_timeout: float  # seconds


class RankConnection:
    """Used on the owner thread only.

    Raises PeerError if the rank cannot be connected to or its memory is not what it announced. ``on_failure`` gets the
    reason of a failure, once, unless the owner had given the connection up before. Errors begin with ``prefix``.
    """

    def __init__(
        self, context: TransferContext, source: SourceRank, prefix: str, on_failure: Callable[[str], None]
    ) -> None:
        self.failure = ""  # reason, once no new chunk is posted
        self._context = context
        self._rank = source.rank
        self._slices = source.slices
        self._prefix = prefix
        self._on_failure = on_failure
        self._prepared: list[int] = []
        self._waiting: deque[tuple[PendingRead, ReadChunk]] = deque()
        self._in_flight: list[_PostedChunk] = []
        self._failed_at = 0.0
        self._stall_check_at = 0.0
        self._received_bytes = -1  # at the last stall check; -1: not counted
        self._advanced_at = 0.0
        self._sockets_shut = False
        self._sockets = PeerSockets(context.agent.metadata(), self._rank.metadata)
        context.agent.add(self._rank.metadata)
        try:
            self._remote = self._prepare(self._rank.agent, self._rank.region, self._slices.remote)
            self._remote_start = self._prepare(
                self._rank.agent, self._rank.region, BlockRanges.whole(TEST_READ_BYTES, 1)
            )
            self._local = self._prepare(None, context.region, self._slices.local)
        except PeerError:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._waiting)

    @property
    def drained(self) -> bool:
        """Whether nothing from this rank can land any more or will be posted."""
        return bool(self.failure) and not self._in_flight

    def test_read(self, read: PendingRead) -> None:
        """Read a few bytes, as the one chunk of ``read`` on this connection.

        Their arrival proves the data path, and makes UCX do the work that it delays until the first transfer. GPU
        memory is skipped: a read into host memory may take a path that no block takes.
        """
        if self.failure or self._rank.region.device != "cpu":
            read.end_chunk(self.failure)
            return
        only = np.zeros(1, np.int32)
        self._post(read, lambda: self._context.agent.read(self._context.scratch, only, self._remote_start, only))

    def plan(self, read: KVRead) -> list[ReadChunk]:
        """Return the chunks of ``read`` that come from this rank. Raises PeerError."""
        return plan_read(read, self._slices, CHUNK_BYTES[self._context.region.device])

    def submit(self, read: PendingRead, chunks: list[ReadChunk]) -> None:
        """Queue chunks made by ``plan``; the connection has not failed."""
        assert not self.failure
        self._waiting.extend((read, chunk) for chunk in chunks)

    def advance(self) -> bool:
        """Post one chunk and poll those in flight. Return whether anything moved."""
        moved = self._post_next()
        for chunk in list(self._in_flight):
            # A chunk in doubt is posted again, into blocks that it still owns: it fails once the endpoint is dead.
            moved |= self._step(chunk, post=chunk.in_doubt)
        now = time.monotonic()
        if moved or now - self._advanced_at > self._context.stall_timeout / 4:  # then this thread stood still
            self._restart_stall_check(now)
        elif self._in_flight and now > self._stall_check_at:
            self._check_stall(now)
        self._advanced_at = now
        if self._in_flight and self.failure and now - self._failed_at > GRACE_SECONDS:
            self._shut_sockets()
        return moved

    def fail(self, reason: str) -> None:
        """Post nothing more. Waiting chunks end now with ``reason``, chunks in flight when their transfer ends."""
        if self.failure:
            return
        self.failure, self._failed_at = reason, time.monotonic()
        while self._waiting:
            self._waiting.popleft()[0].end_chunk(reason)

    def abort(self) -> None:
        """Make the transfers in flight end now."""
        if self._in_flight:
            self._shut_sockets()

    def close(self) -> None:
        """Forget this rank in the agent; only once drained, or right before the agent is destroyed."""
        while self._prepared:
            self._context.agent.release(self._prepared.pop())
        self._context.agent.remove(self._rank.agent)

    def _prepare(self, owner: str | None, region: KVRegion, ranges: BlockRanges) -> int:
        self._prepared.append(self._context.agent.prepare(owner, region, ranges))
        return self._prepared[-1]

    # ------------------------------------------------------------ stalls

    def _restart_stall_check(self, now: float, received_bytes: int = -1) -> None:
        self._stall_check_at = now + self._context.stall_timeout / 2
        self._received_bytes = received_bytes

    def _check_stall(self, now: float) -> None:
        """No chunk has ended for half a stall timeout. That is no stall while bytes arrive over TCP sockets.

        Other networks have no sockets, and are never that slow.
        """
        received = self._sockets.received_bytes()
        if self._received_bytes == -1 or received > self._received_bytes:
            self._restart_stall_check(now, received)
            return
        self._report_failure(
            f"no byte arrived for {self._context.stall_timeout:g} s: the peer hangs or its network is cut"
        )
        self._shut_sockets()

    # ------------------------------------------------------------ chunks

    def _report_failure(self, reason: str) -> None:
        if not self.failure:
            self.fail(self._prefix + reason)
            self._on_failure(self.failure)

    def _post_next(self) -> bool:
        if not self._waiting or len(self._in_flight) >= CHUNKS_IN_FLIGHT:
            return False
        read, chunk = self._waiting.popleft()
        local, remote = self._slices.local.descriptors(chunk.local), self._slices.remote.descriptors(chunk.remote)
        self._post(read, lambda: self._context.agent.read(self._local, local, self._remote, remote))
        return True

    def _post(self, read: PendingRead, create: Callable[[], NixlTransfer]) -> None:
        try:
            chunk = _PostedChunk(read, create())
        except PeerError as error:  # nothing was posted
            read.end_chunk(self._prefix + str(error))
            self._report_failure(str(error))
            return
        if not self._in_flight:
            self._restart_stall_check(time.monotonic())
        self._in_flight.append(chunk)
        self._step(chunk, post=True)

    def _step(self, chunk: _PostedChunk, post: bool) -> bool:
        """Post or poll a chunk. Return whether it has ended."""
        try:
            if not (chunk.transfer.post() if post else chunk.transfer.done()) or chunk.in_doubt:
                return False
        except Disconnected as error:
            self._end(chunk, self._prefix + str(error))
            self._report_failure(str(error))
            return True
        except PeerError as error:
            chunk.in_doubt = True
            chunk.read.fail(self._prefix + str(error))
            self._report_failure(str(error))
            self._shut_sockets()
            return False
        self._end(chunk, self.failure)
        return True

    def _end(self, chunk: _PostedChunk, error: str) -> None:
        self._in_flight.remove(chunk)
        chunk.transfer.release()
        chunk.read.end_chunk(error)

    def _shut_sockets(self) -> None:
        if self._sockets_shut:
            return
        self._sockets_shut = True
        count = self._sockets.shut()
        logger.warning("%s: %s; shut %d of its connections down", self._rank.agent, self.failure, count)
