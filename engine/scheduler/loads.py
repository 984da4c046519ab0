"""Prompts whose KV a peer has, from their admission until they run or are computed here.

A load brings all KV of a prompt, or in a pull that of a prefix. In a split, this node computes the first tokens of a
prompt while the KV of the later ones is pulled:

    tokens    0 ·· cached ·· ├──── steps compute ────┤ meeting ├──── reads bring ────┤ ·· computed afterwards
                                                   │                           │
                                                   └────── both have ended ────┘► the sequence runs

Neither part needs the other one. A step computes no token behind the meeting point before the pull is confirmed, so it
attends to no byte that is not. The sequence has all of its blocks, and is one of the loading ones, until it runs.

If nothing comes, the sequence runs on in its blocks. If it gives up what a transfer may still write to, it loses its
blocks instead, as after any other load: the tokens that it has computed are in the prefix cache then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.peer_kv import PeerKV
from engine.scheduler.choices import ChoiceManager
from engine.scheduler.live_sequences import LiveSequences
from engine.sequence import Sequence
from engine.sequence_parts import SplitLoad
from pdserve.ipc.messages import Outputs


class KVLoads:
    """The part of the scheduler that ends loads. ``clock`` is the scheduler's."""

    def __init__(
        self,
        live: LiveSequences,
        kv: KVCacheManager,
        peers: PeerKV,
        choices: ChoiceManager,
        *,
        branch: Callable[[Sequence], None],
        clock: Callable[[], float],
    ) -> None:
        """``branch`` queues the other choices of a sequence whose prompt has KV."""
        self._live = live
        self._kv = kv
        self._peers = peers
        self._choices = choices
        self._branch = branch
        self._clock = clock

    def ends_in(self, rid: int, seconds: float) -> None:
        """The peer computes the last chunk of a load for so long. Ignored for a load that has ended."""
        self._peers.handoff_ends(rid, self._clock() + seconds)

    def split(self, rid: int, num_tokens: int) -> None:
        """Compute the first ``num_tokens`` tokens of a prompt, in full blocks, while those behind them are pulled.

        Ignored for a load that has ended.
        """
        sequence = self._live.loading.get(rid)
        if sequence is not None:
            assert sequence.split is None
            assert sequence.state is None, "a recurrent state is that of all tokens before it"
            assert not self._kv.has_windows, "windows of a load have no place before it ends"
            assert sequence.num_computed < num_tokens < sequence.load_len
            self._peers.load_behind(sequence, num_tokens)
            sequence.split = SplitLoad(num_tokens)
            self._kv.limit_ready_blocks(sequence, num_tokens)

    def confirmed(self, rid: int, num_tokens: int, outputs: Outputs, waited: float) -> None:
        """Continue with the KV that was read, after the tokens that P has sampled, the last ``waited`` seconds ago."""
        sequence = self._live.loading.get(rid)
        if sequence is None:
            return
        if not self._peers.finish_load(sequence, num_tokens, self._clock()):
            self.given_up(rid, outputs)
            return
        sequence.request.waits_since = self._clock() - waited
        if sequence.split is not None:
            assert not outputs, "a source of pulls samples nothing"
            self._first_part_is_missing(sequence, num_tokens)
            return
        self._end(sequence)
        self._take_kv(sequence, max(num_tokens, sequence.num_computed))
        self._live.run(sequence)
        if outputs and not self._choices.take_from_peer(sequence, outputs):
            self._live.finish(sequence)
        self._branch(sequence)

    def given_up(self, rid: int, outputs: Outputs) -> None:
        """Drop the KV that was read and compute the prompt here, before waiting requests."""
        sequence = self._live.loading.get(rid)
        if sequence is None:
            return
        if sequence.split is not None:
            assert not outputs, "a source of pulls samples nothing"
            self._give_up_split(sequence)
            return
        self._end(sequence)
        self._live.preempt(sequence, self._clock())
        if outputs and not self._choices.take_from_peer(sequence, outputs):
            self._live.finish(sequence)

    # ------------------------------------------------------------ splits

    def computable(self) -> Iterator[Sequence]:
        """Yield the loading sequences that the next step may include."""
        return (sequence for sequence in self._live.loading.values() if sequence.split is not None and sequence.missing)

    def join_splits(self) -> None:
        """A step has been applied: end the splits for whose first part that was the last step."""
        for sequence in list(self._live.loading.values()):
            if sequence.split is not None:
                self._join(sequence)

    def _first_part_is_missing(self, sequence: Sequence, num_tokens: int) -> None:
        """A pull has brought the KV up to ``num_tokens`` tokens; steps compute the first part. 0: it has none."""
        assert sequence.split is not None
        if num_tokens <= sequence.split.meeting:
            self._run(sequence)
            return
        sequence.split.confirmed = num_tokens
        self._join(sequence)

    def _give_up_split(self, sequence: Sequence) -> None:
        assert sequence.split is not None
        if not self._peers.reading(sequence):
            self._peers.abandon_load(sequence)
            self._run(sequence)
            return
        sequence.split.given_up = True
        sequence.split.meeting = sequence.num_launched
        self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        """Go on behind the pulled part, or without blocks, once the first part is computed."""
        split = sequence.split
        assert split is not None
        if sequence.num_computed < split.meeting:
            return
        if split.given_up:
            self._end(sequence)
            self._end_split(sequence)
            self._live.preempt(sequence, self._clock())
        elif split.confirmed:
            self._end(sequence)
            self._live.drop_in_runner(sequence)  # it comes back with the tokens that were pulled
            self._take_kv(sequence, split.confirmed)
            self._live.run(sequence)
            self._branch(sequence)

    def _run(self, sequence: Sequence) -> None:
        """Compute all that is missing, in the blocks of the sequence; a step may be in flight."""
        self._end(sequence)
        self._end_split(sequence)
        if sequence.request.paused:
            self._live.drop_in_runner(sequence)
        self._live.run(sequence)
        self._branch(sequence)

    def _end_split(self, sequence: Sequence) -> None:
        """Let steps compute all that is missing, in all blocks."""
        if sequence.split is not None:
            sequence.split = None
            self._kv.make_all_blocks_ready(sequence)

    def _take_kv(self, sequence: Sequence, num_tokens: int) -> None:
        """Go on behind the first ``num_tokens`` tokens, whose KV is here.

        Pulled tokens count as cached, tokens computed meanwhile do not; after a handoff no count is reported.
        """
        request = sequence.request
        computed_beside = 0
        if sequence.split is not None:
            assert sequence.num_computed == sequence.split.meeting
            assert request.cached_tokens is not None, "a sequence with blocks was admitted"
            computed_beside = sequence.split.meeting - request.cached_tokens
            self._end_split(sequence)
        self._kv.received(sequence, num_tokens)
        request.cached_tokens = min(sequence.num_computed, sequence.prompt_len) - computed_beside

    def _end(self, sequence: Sequence) -> None:
        del self._live.loading[sequence.rid]
        sequence.request.end_load()
