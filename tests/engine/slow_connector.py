"""A connector whose blocks land one by one, when a test says so, with the source's content at that time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from toy import ToyRunner

from connector.completion_queue import CompletionQueue
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.kv.states import NO_SLOT
from pdserve.kv.transports import Connected
from pdserve.records import KVConnectorOutput, KVRead, Peer, RankKV, ReadResult


@dataclass
class Transfer:
    """A read that has not ended. After a disconnect it will fail, but its bytes still land."""

    order: KVRead
    source: ToyRunner
    missing: deque[tuple[bool, int, int]]  # (is a recurrent state, local block or slot, remote block or slot)
    will_fail: bool = False

    @property
    def epoch(self) -> str:
        return self.order.epoch


class SlowConnector:
    """``source_of`` returns the peer's runner by epoch; None if that epoch has ended."""

    def __init__(self, epoch: str, source_of: Callable[[str], ToyRunner | None]) -> None:
        self.runner: ToyRunner  # ours
        self.transfers: dict[int, Transfer] = {}
        self._epoch = epoch
        self._source_of = source_of
        self._peers: set[str] = set()
        self._completions = CompletionQueue()

    # ------------------------------------------------------------ a KVConnector

    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        self._completions.on_progress = on_progress
        return RankKV(self._epoch, b"slow", region, layout)

    def connect(self, peer: Peer) -> None:
        self._peers.add(peer.epoch)
        self._completions.connected(Connected(peer.epoch, "shm"))

    def disconnect(self, epoch: str) -> None:
        self._peers.discard(epoch)
        for transfer in self.transfers.values():
            transfer.will_fail |= transfer.epoch == epoch

    def read(self, read: KVRead) -> None:
        source = self._source_of(read.epoch)
        if read.epoch not in self._peers or source is None:
            self._completions.read_refused(read, f"no connection to {read.epoch}")
            return
        missing = deque((False, *pair) for pair in zip(read.local_blocks, read.remote_blocks, strict=True))
        if read.local_state != NO_SLOT:
            missing.append((True, read.local_state, read.remote_state))
        self.transfers[read.read_id] = Transfer(read, source, missing)

    def poll(self) -> KVConnectorOutput:
        return self._completions.drain()

    def close(self) -> None:
        """Nothing to close."""

    # ------------------------------------------------------------ events

    def land(self, read_id: int) -> None:
        """Land one more block; after the last one, end the read."""
        transfer = self.transfers[read_id]
        if transfer.missing:
            is_state, local, remote = transfer.missing.popleft()
            ours = self.runner
            theirs = transfer.source
            if is_state:
                ours.slots[local] = theirs.slots[remote]
            else:
                ours.cache[local] = theirs.cache[remote]
        elif transfer.will_fail:
            self.fail(read_id)
        else:
            self._completions.read_ended(ReadResult(self.transfers.pop(read_id).order.read_id))

    def fail(self, read_id: int) -> None:
        """End a read with an error; none of its bytes lands any more."""
        self._completions.read_refused(self.transfers.pop(read_id).order, "the connection broke")
