"""Prompts that this node computes for peers: they decode ahead until a peer takes over, and give way to others."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.scheduler.live_sequences import LiveSequences
from engine.scheduler.room import Room
from engine.sequence import Sequence
from pdserve.ipc.messages import DecodeAheadEnded, EventBatch


class PeerPrompts:
    def __init__(self, live: LiveSequences, kv: KVCacheManager, room: Room, events: EventBatch) -> None:
        self._live = live
        self._kv = kv
        self._room = room
        self._events = events

    def decode_ahead(self, ahead: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Return which of the sequences that may decode for their peers do so in this step, beside prompts, too.

        They end here if a waiting request lacks their room, or blocks run out.
        """
        head = self._live.waiting.head
        lacks_room = head is not None and (
            self._room.free_places <= 0 or self._room.lacks_slot(head) or not self._room.may_have_blocks(head)
        )
        if not lacks_room and self._kv.grow(ahead):
            return ahead
        self.end_ahead(ahead)
        return ()

    def end_ahead(self, ahead: Iterable[Sequence]) -> bool:
        """End sequences that decode for their peers; return whether there was one.

        Without outputs, the end of its prompt is in flight and the peer waits for that.
        """
        ended = [sequence for sequence in ahead if sequence.num_outputs]
        for sequence in ended:
            self._events.decode_ahead_ended.append(DecodeAheadEnded(sequence.rid))
            self._live.finish(sequence)
        return bool(ended)
