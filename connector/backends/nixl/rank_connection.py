"""Connection to one rank of a peer: the chunks of reads that come from it. A PeerConnection has one or several.

A chunk waits, is posted and ends with its transfer (transfers.py); if the connection fails before, it is never posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from connector.backends.nixl.agent import NixlAgent
from connector.backends.nixl.transfers import Transfers
from connector.planning.block_slicing import BlockRanges
from connector.planning.rank_mapping import SourcePart, SourceRank
from connector.planning.transfer_plan import ReadChunk, plan_read
from pdserve.errors import PeerError
from pdserve.kv.layout import KVRegion
from pdserve.records import KVRead, RankKV

# By target device. Copies between processes of a host happen inside the post, so a chunk bounds how long a post blocks
# the owner thread. A GPU copies by itself and needs enough work between two polls.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
CHUNKS_IN_FLIGHT = 4
TEST_READ_BYTES = 64


class PendingRead:
    """The chunks of one read, over all connections that they use.

    ``on_end`` gets the first error, or "", when the last chunk has ended: never earlier, whatever has failed.
    """

    def __init__(self, num_chunks: int, on_end: Callable[[str], None]) -> None:
        self._num_left = num_chunks
        self._on_end = on_end
        self._error = ""

    def end_chunk(self, error: str) -> None:
        self._error = self._error or error
        self._num_left -= 1
        if not self._num_left:
            self._on_end(self._error)


class TransferContext(NamedTuple):
    agent: NixlAgent
    rank: RankKV  # the local one
    scratch: int  # one prepared descriptor of TEST_READ_BYTES
    stall_timeout: float  # seconds


class PreparedPart(NamedTuple):
    """The part of a read that comes from one rank. NIXL has prepared descriptors for each number of slices."""

    source: SourcePart
    local: list[int]
    remote: list[int]


class PartChunk(NamedTuple):
    part: PreparedPart
    chunk: ReadChunk


class RankConnection:
    """Used on the owner thread only.

    Raises PeerError if the rank cannot be connected to or its memory is not what it announced. ``on_failure`` gets the
    reason of a failure, once, unless the owner had given the connection up before. Errors begin with ``prefix``.
    """

    def __init__(
        self, context: TransferContext, source: SourceRank, prefix: str, on_failure: Callable[[str], None]
    ) -> None:
        self._context = context
        self._rank = source.rank
        self._on_failure = on_failure
        self._prepared: list[int] = []
        self._waiting: deque[tuple[PendingRead, PartChunk]] = deque()
        self._transfers = Transfers(
            context.agent,
            self._rank.agent,
            self._rank.metadata,
            stall_timeout=context.stall_timeout,
            prefix=prefix,
            failed=self._failed,
        )
        context.agent.add(self._rank.metadata)
        try:
            self._parts = [self._prepare_part(part) for part in source.parts(context.rank)]
            self._remote_start = self._prepare(
                self._rank.agent, self._rank.region, BlockRanges.whole(TEST_READ_BYTES, 1)
            )
        except PeerError:
            self.close()
            raise

    @property
    def failure(self) -> str:
        """The reason, once no new chunk is posted."""
        return self._transfers.failure

    @property
    def busy(self) -> bool:
        return bool(self._transfers or self._waiting)

    @property
    def drained(self) -> bool:
        """Whether nothing from this rank can land any more or will be posted."""
        return bool(self.failure) and not self._transfers

    def test_read(self, read: PendingRead) -> None:
        """Read a few bytes, as the one chunk of ``read`` on this connection.

        Their arrival proves the data path, and makes UCX do the work that it delays until the first transfer. GPU
        memory is skipped: a read into host memory may take a path that no block takes.
        """
        if self.failure or self._rank.region.device != "cpu":
            read.end_chunk(self.failure)
            return
        only = np.zeros(1, np.int32)
        agent = self._context.agent
        scratch = self._context.scratch
        self._transfers.post(lambda: agent.read(scratch, only, self._remote_start, only), read.end_chunk)

    def plan(self, read: KVRead) -> list[PartChunk]:
        """Return the chunks of ``read`` that come from this rank. Raises PeerError."""
        most = CHUNK_BYTES[self._context.rank.region.device]
        return [
            PartChunk(part, chunk)
            for part in self._parts
            for chunk in plan_read(part.source.read_of(read), part.source.slices, most)
        ]

    def submit(self, read: PendingRead, chunks: list[PartChunk]) -> None:
        """Queue chunks made by ``plan``; the connection has not failed."""
        assert not self.failure
        self._waiting.extend((read, chunk) for chunk in chunks)

    def advance(self) -> bool:
        """Post one chunk and poll those in flight. Return whether anything moved."""
        posted = self._post_next()
        return self._transfers.poll() or posted

    def fail(self, reason: str) -> None:
        """Post nothing more. Waiting chunks end now with ``reason``, chunks in flight when their transfer ends."""
        self._transfers.fail(reason)
        while self._waiting:
            self._waiting.popleft()[0].end_chunk(self.failure)

    def abort(self) -> None:
        """Make the transfers in flight end now."""
        self._transfers.shut_sockets()

    def close(self) -> None:
        """Forget this rank in the agent; only once drained, or right before the agent is destroyed."""
        while self._prepared:
            self._context.agent.release(self._prepared.pop())
        self._context.agent.remove(self._rank.agent)

    def _prepare_part(self, part: SourcePart) -> PreparedPart:
        return PreparedPart(
            part,
            [self._prepare(None, part.local, slices.local) for slices in part.slices],
            [self._prepare(self._rank.agent, part.remote, slices.remote) for slices in part.slices],
        )

    def _prepare(self, owner: str | None, region: KVRegion, ranges: BlockRanges) -> int:
        """Return the number of prepared descriptors; -1 for a group of which the rank has no layers."""
        if not len(ranges.offsets):
            return -1
        self._prepared.append(self._context.agent.prepare(owner, region, ranges))
        return self._prepared[-1]

    def _failed(self, reason: str) -> None:
        self.fail(reason)
        self._on_failure(reason)

    def _post_next(self) -> bool:
        if not self._waiting or len(self._transfers) >= CHUNKS_IN_FLIGHT:
            return False
        read, (part, chunk) = self._waiting.popleft()
        slices = part.source.slices[chunk.number]
        agent = self._context.agent
        local = slices.local.descriptors(chunk.local)
        remote = slices.remote.descriptors(chunk.remote)
        create = partial(agent.read, part.local[chunk.number], local, part.remote[chunk.number], remote)
        self._transfers.post(create, read.end_chunk)
        return True
