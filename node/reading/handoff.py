"""State machine of one handoff on D, or of a pull on any node: events in, actions out, no I/O, no clock.

The protocol is docs/leases.md.

    waiting ─first part announced─► reading ─all read─► confirming ─lease stood, digests equal─► confirmed
       │                               │                    │
       └─────────────────────── any failure ────────────────┴──► given up

``limit`` is the time by D's clock until which P certainly keeps announced blocks: a lease's length after D sent a
request that P has answered, less a margin. D reads nothing beyond it. D extends the lease after a third of the time
left, or at once if less than a third of a lease is left. If next to nothing is left, D reads only after the answer.
D computes no token from a read before P has confirmed that the lease stood. With checksums, D's engine compares the
digests of what it read meanwhile, and no token comes from a read before that, either.

In a pull, P computes and samples nothing: its last part may end before the last tokens, and Finished follows. If there
was no part, nothing has to be confirmed. A pull may be ``due``: D gives up a pull that takes longer than computation.
P may revoke the lease of a pull at any time before it confirms the lease. Then D drops what it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from pdserve.errors import LeaseRevoked, PdserveError, PeerError
from pdserve.ipc.messages import KVConfirmed, Outputs, ReadChecked, ReadEnded, StartRead
from pdserve.kv.states import NO_SLOT
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer
from pdserve.rpc.errors import failure_from_pb
from pdserve.rpc.timeouts import PeerTiming

_MARGIN_SHARE = 0.1  # fraction of a lease at its end in which nothing is read
_MARGIN_MAX = 1.0  # seconds, the longest margin
_EXTEND_SHARE = 1 / 3  # extend after this fraction of the time left, or at once if less than it is left of a lease
_ANSWER_SHARE = 0.2  # fraction of a lease that must be left when a read begins
_ANSWER_MAX = 0.1  # seconds, upper bound of that time
_MAX_STALL = 3  # lengths of a lease without a read that begins or ends, after which D stops extending


class ReadFailed(PeerError):
    """The connector's connection to the peer cannot be relied on."""


class PullLate(PeerError):
    """The peer is too slow for a pull to be worth more time."""


class Phase(StrEnum):
    WAITING = "waiting"
    READING = "reading"
    CONFIRMING = "confirming"
    CONFIRMED = "confirmed"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """P's KV will not be used."""

    error: PdserveError


Event = (
    pb.PrefillEvent | ReadEnded | ReadChecked | PeerError | None
)  # PeerError: the stream has ended; None: time has passed
ToPeer = pb.ExtendRequest | pb.ReleaseRequest
Action = StartRead | KVConfirmed | ToPeer | HandoffFailed


class Handoff:
    """One prompt at one prefill node, from the request to P until its KV is confirmed or given up."""

    def __init__(
        self,
        rid: int,
        number: int,
        num_tokens: int,
        *,
        peer: Peer,
        timing: PeerTiming,
        sent_at: float,
        pull: bool = False,
        due: float = inf,
    ) -> None:
        """``number`` is the prompt's on the stream to P; ``sent_at`` is when the prompt was sent, or earlier."""
        self.number = number
        self.phase = Phase.WAITING
        self.sent_at = self.limit = sent_at
        self.announced = 0  # prompt tokens
        self.outputs: Outputs = ()  # tokens that P has sampled, by choice
        self._rid = rid
        self._peer = peer
        self._timing = timing
        self._num_tokens = num_tokens  # prompt tokens that P will announce; fewer in a pull if P has no more
        self._pull = pull
        self._due = due
        self._refused = False  # P failed the prompt before its first part, or revoked the lease: it holds nothing
        self._lease_seconds = 0.0
        self._to_read: list[StartRead] = []
        self._num_reads = 0  # in flight
        self._num_unchecked = 0  # reads whose digests have not been compared
        self._stood = False  # P has confirmed that the lease stood
        self._progress_at = sent_at  # when a read last began or ended
        self._num_extends = 0
        self._extend_sent_at = 0.0  # latest
        self._extend_at = inf  # next
        self._answer_due = inf  # time by which P must answer the Extend or Release in flight; inf: none

    @property
    def active(self) -> bool:
        """P's KV may still be used. Otherwise no event changes anything, and the stream may forget ``number``."""
        return self.phase not in (Phase.CONFIRMED, Phase.GIVEN_UP)

    @property
    def wake_at(self) -> float:
        """When ``on(None)`` must be called unless another event comes before; infinity for never."""
        if not self.active:
            return inf
        if self.phase is not Phase.READING:
            return min(self._answer_due, self._due)
        extend_at = self._extend_at if self._may_extend else inf
        return min(extend_at, self._answer_due, self.limit if self._num_reads else inf, self._due)

    def on(self, event: Event, now: float) -> list[Action]:
        """Apply an event; return the actions to take, in this order. HandoffFailed, if any, is the last."""
        if not self.active:
            return []
        try:
            self._apply(event, now)
            return self._next_actions(now)
        except PdserveError as error:
            return [*self.give_up(), HandoffFailed(error)]

    def give_up(self) -> list[Action]:
        """Drop P's KV; return the Release that P needs, unless it was sent or P holds nothing. Idempotent."""
        if not self.active:
            return []
        needed = self.phase is not Phase.CONFIRMING and not self._refused
        self.phase = Phase.GIVEN_UP
        return [pb.ReleaseRequest(request=self.number)] if needed else []

    def add_first_tokens(self, tokens: Sequence[int]) -> None:
        """Record P's first token of each choice. Raises PeerError on a repetition."""
        if self.outputs:
            raise PeerError(f"{self._peer.node_id} sent first tokens twice")
        self.outputs = tuple((token,) for token in tokens)

    def add_next_token(self, token: int, max_tokens: int) -> int:
        """Record a token that P decoded ahead; return the number of tokens so far.

        Raises PeerError unless there is exactly one choice, with fewer than ``max_tokens`` tokens.
        """
        if len(self.outputs) != 1:
            raise PeerError(f"{self._peer.node_id} sent a next token of {len(self.outputs)} choices")
        if len(self.outputs[0]) >= max_tokens:
            raise PeerError(f"{self._peer.node_id} sent a token after the {max_tokens} that were requested")
        self.outputs = ((*self.outputs[0], token),)
        return len(self.outputs[0])

    # ------------------------------------------------------------ events

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case pb.PrefillEvent():
                self._apply_prefill_event(event, now)
            case ReadEnded():
                if event.result.error:
                    raise ReadFailed(f"reading KV failed: {event.result.error}")
                self._num_reads -= 1
                self._progress_at = now
            case ReadChecked():
                if event.num_corrupt:
                    raise PeerError(f"KV read from {self._peer.node_id} is corrupt: {event.error}")
                self._num_unchecked -= 1
            case PeerError() if not self._stood:
                raise event
            case None if now >= self._due:
                raise PullLate(f"{self._peer.node_id} is late with cached KV")
            case None if now >= self._answer_due:
                self._on_answer_timeout(now)

    def _apply_prefill_event(self, event: pb.PrefillEvent, now: float) -> None:
        match event.WhichOneof("kind"):
            case "kv_ready":
                self._on_part(event.kv_ready, now)
            case "first_tokens" | "next_token" if self._pull:
                raise PeerError(f"{self._peer.node_id} sent tokens of a pull, for which it computes nothing")
            case "extended" if self.phase is Phase.READING and event.extended.ask == self._num_extends:
                if not event.extended.lease_ms:
                    raise PeerError(f"the lease at {self._peer.node_id} ended while its blocks were being read")
                self._answer_due = inf
                self._move_limit(self._extend_sent_at, event.extended.lease_ms / 1000, now)
            case "released" if event.released.revoked and not self._stood:
                self._refused = True
                raise LeaseRevoked(f"{self._peer.node_id} needs the blocks of a lease itself")
            case "released" if self.phase is Phase.CONFIRMING:
                if not event.released.stood:
                    raise PeerError(f"the lease at {self._peer.node_id} ended before its blocks had been read")
                self._stood = True
                self._answer_due = inf
            case "finished" if self._pull and not self._complete:
                self._num_tokens = self.announced
                self._stood = not self.announced  # then P holds nothing
            case "finished" if not self._complete:
                raise PeerError(f"{self._peer.node_id} ended a prompt without leasing its blocks")
            case "failed" if not self._complete or (self.phase is Phase.CONFIRMING and not self._stood):
                self._refused = not self.announced
                raise failure_from_pb(event.failed, self._peer.node_id)

    def _on_part(self, part: pb.KVReady, now: float) -> None:
        peer = self._peer.node_id
        if self._complete:
            raise PeerError(f"{peer} announced blocks after the last ones of a prompt")
        if not part.block_ids or not self.announced < part.num_tokens <= self._num_tokens:
            what = f"{len(part.block_ids)} blocks up to token {part.num_tokens} of {self._num_tokens}"
            raise PeerError(f"{peer} announced {what}, after those up to {self.announced}")
        if self.phase is Phase.WAITING:
            self.phase = Phase.READING
            self._lease_seconds = part.lease_ms / 1000
            self._move_limit(self.limit, self._lease_seconds, now)
        self.announced = part.num_tokens
        if self._complete and not self.outputs and not self._pull:
            raise PeerError(f"{peer} announced a whole prompt without first tokens")
        read = StartRead(
            rid=self._rid,
            epoch=self._peer.epoch,
            remote_blocks=tuple(part.block_ids),
            num_tokens=part.num_tokens,
            digests=tuple(part.digests),
            remote_state=part.state_slot if part.HasField("state_slot") else NO_SLOT,
            pull=self._pull,
        )
        self._to_read.append(read)

    def _on_answer_timeout(self, now: float) -> None:
        """Extend again before the limit; an unanswered Release ends the handoff."""
        self._answer_due = inf
        if self.phase is Phase.CONFIRMING:
            raise PeerError(f"{self._peer.node_id} did not answer whether a lease stood")
        if now >= self.limit:
            raise PeerError(f"{self._peer.node_id} did not answer a request to extend a lease")
        self._extend_at = now + (self.limit - now) * _EXTEND_SHARE

    def _move_limit(self, sent_at: float, seconds: float, now: float) -> None:
        self.limit = max(self.limit, sent_at + seconds - min(_MARGIN_MAX, seconds * _MARGIN_SHARE))
        left = self.limit - now
        self._extend_at = now if left < seconds * _EXTEND_SHARE else now + left * _EXTEND_SHARE

    # ------------------------------------------------------------ actions

    @property
    def _complete(self) -> bool:
        return self.announced >= self._num_tokens

    @property
    def _may_extend(self) -> bool:
        stalled = self._num_reads and self._extend_at - self._progress_at > _MAX_STALL * self._lease_seconds
        return self._answer_due == inf and not stalled

    def _next_actions(self, now: float) -> list[Action]:
        if self._stood and not self._num_unchecked:
            self.phase = Phase.CONFIRMED
            return [KVConfirmed(self._rid, self.announced, self.outputs)]
        if self.phase is not Phase.READING:
            return []
        if self._complete and not self._num_reads and not self._to_read:
            self.phase = Phase.CONFIRMING
            self._answer_due = now + self._timing.timeout
            return [pb.ReleaseRequest(request=self.number)]
        if now >= self.limit and self._num_reads:
            raise ReadFailed(f"reading took longer than the {self.limit - self._progress_at:.3g} s that the lease left")
        actions: list[Action] = []
        if self._to_read and self.limit - now >= min(_ANSWER_MAX, self._lease_seconds * _ANSWER_SHARE):
            actions += self._to_read
            self._num_reads += len(self._to_read)
            self._num_unchecked += sum(bool(part.digests) for part in self._to_read)
            self._to_read.clear()
            self._progress_at = now
        if now >= self._extend_at and self._may_extend:
            actions.append(self._extend(now))
        return actions

    def _extend(self, now: float) -> pb.ExtendRequest:
        self._num_extends += 1
        self._extend_sent_at = now
        self._answer_due = now + self._timing.answer_timeout
        return pb.ExtendRequest(request=self.number, ask=self._num_extends)
