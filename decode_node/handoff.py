"""The handoff of one request on D as a state machine: events in, actions out, no I/O, no clock. See docs/leases.md.

    waiting ─part announced─► reading ─all read─► confirming ─it was kept─► confirmed
       │                         │                    │
       └────────────────── anything fails ────────────┴──► given up   (recompute, or an error: the caller chooses)

``limit`` is until when, by our clock, P certainly keeps what it has announced: a lease's length after we sent a request
that P has answered, less a margin. Nothing is read beyond it. A third of the way there we ask P to extend the lease, as
long as reads go on; at once, if P took so long that little is left of it, and before reading, if next to nothing is.
P says no when the lease has ended, and then what was read is worth nothing. No token is computed from a read that P has
not confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import inf

from engine.ipc.messages import KVConfirmed, Outputs, ReadEnded, StartRead
from pdserve.errors import PdserveError, PeerError
from pdserve.pb import pdserve_pb2 as pb

_MARGIN_SHARE, _MARGIN_MAX = 0.1, 1.0  # how long before a lease's end reading stops: a share of it, at most seconds
_EXTEND_SHARE = 1 / 3  # when to extend: after that share of the time left, at once if less than that of a lease is left
_ANSWER_SHARE, _ANSWER_MAX = 0.2, 0.1  # for P to extend it: with less left than that, no read begins
_PATIENCE = 3  # lengths of a lease for which it is extended though no read has ended


class ReadFailed(PeerError):
    """The connector's connection to the peer cannot be relied on."""


class Phase(StrEnum):
    WAITING = "waiting"
    READING = "reading"
    CONFIRMING = "confirming"
    CONFIRMED = "confirmed"
    GIVEN_UP = "given up"


class Ask(Enum):
    """A request to P about the lease; each is answered by one event."""

    EXTEND = "extend"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Extended:
    """The answer to Ask.EXTEND."""

    asked_at: float  # when the request was sent
    seconds: float  # P keeps the lease so long from when it received it; 0: it has ended
    error: PdserveError | None = None  # there was no answer


@dataclass(frozen=True, slots=True)
class Released:
    """The answer to Ask.RELEASE."""

    stood: bool


# A PdserveError says why P announces no more, if it has not announced all; None that time has passed.
Event = pb.KVReady | ReadEnded | Extended | Released | PdserveError | None
Action = StartRead | KVConfirmed | Ask


class Handoff:
    """From reserved blocks to KV that may be used. ``asked_at`` is when P was asked to prefill, or earlier."""

    def __init__(self, rid: int, epoch: str, peer: str, num_tokens: int, asked_at: float) -> None:
        self.rid = rid
        self.phase = Phase.WAITING
        self.limit = asked_at
        self._epoch = epoch
        self._peer = peer
        self._num_tokens = num_tokens
        self.outputs: Outputs = ()  # what P has sampled, by choice
        self._lease = 0
        self._term = 0.0  # seconds
        self._announced = 0  # tokens of the prompt
        self._to_read: list[StartRead] = []
        self._num_reads = 0  # under way
        self._progress = asked_at  # when a read began or ended last
        self._extending = False
        self._extend_at = inf

    def sampled(self, first: Sequence[int]) -> None:
        """P's first tokens have come. Raises PeerError when they have come before."""
        if self.outputs:
            raise PeerError(f"{self._peer} sent first tokens twice")
        self.outputs = tuple((token,) for token in first)

    def went_ahead(self, token: int, most: int) -> int:
        """P has sampled one more token; returns which one it is, from 1 on.

        Raises PeerError where there is not one choice that it follows in, or this has ``most`` tokens already.
        """
        if len(self.outputs) != 1:
            raise PeerError(f"{self._peer} sent a next token of {len(self.outputs)} choices")
        if len(self.outputs[0]) >= most:
            raise PeerError(f"{self._peer} sent a token after the {most} that it was asked for")
        self.outputs = ((*self.outputs[0], token),)
        return len(self.outputs[0])

    def on(self, event: Event, now: float) -> list[Action]:
        """Take in what has happened; returns what is to be done about it, in this order.

        Raises PdserveError when that ends the handoff; later events are ignored then.
        """
        if self.phase in (Phase.CONFIRMED, Phase.GIVEN_UP):
            return []
        try:
            self._take(event, now)
            return self._next(now)
        except PdserveError:
            self.phase = Phase.GIVEN_UP
            raise

    @property
    def wake_at(self) -> float:
        """When ``on(None)`` will have something to do if nothing else happens before."""
        if self.phase is not Phase.READING:
            return inf
        return min(self._extend_at if self._wants_more_time else inf, self.limit if self._num_reads else inf)

    # ------------------------------------------------------------ events

    def _take(self, event: Event, now: float) -> None:
        match event:
            case pb.KVReady():
                self._on_part(event, now)
            case ReadEnded():
                if event.num_corrupt:
                    raise PeerError(f"what was read from {self._peer} is corrupt: {event.error}")
                if event.error:
                    raise ReadFailed(f"reading KV failed: {event.error}")
                self._num_reads -= 1
                self._progress = now
            case Extended():
                self._on_extended(event, now)
            case Released():
                if not event.stood:
                    raise PeerError(f"the lease at {self._peer} ended before its blocks had been read")
                self.phase = Phase.CONFIRMED
            case PdserveError() if not self._complete:
                raise event

    def _on_part(self, ready: pb.KVReady, now: float) -> None:
        if not ready.block_ids or ready.num_tokens <= self._announced:
            what = f"{len(ready.block_ids)} blocks up to token {ready.num_tokens}"
            raise PeerError(f"the peer named {what}, after those up to {self._announced}")
        if self.phase is Phase.WAITING:
            self.phase = Phase.READING
            self._lease, self._term = ready.lease, ready.lease_ms / 1000
            self._set_limit(self.limit, self._term, now)
        elif ready.lease != self._lease or self._complete:
            raise PeerError(f"{self._peer} announced blocks of lease {ready.lease} after those of lease {self._lease}")
        self._announced = ready.num_tokens
        if self._complete and not self.outputs:
            raise PeerError(f"{self._peer} announced a whole prompt without first tokens")
        blocks, digests = tuple(ready.block_ids), tuple(ready.digests)
        self._to_read.append(StartRead(self.rid, self._epoch, blocks, ready.num_tokens, digests))

    def _on_extended(self, answer: Extended, now: float) -> None:
        self._extending = False
        if self.phase is not Phase.READING:
            return  # the lease was given back meanwhile
        if answer.error is None and not answer.seconds:
            raise PeerError(f"the lease at {self._peer} ended while its blocks were being read")
        if answer.error is not None and now >= self.limit:
            raise answer.error
        self._set_limit(answer.asked_at, answer.seconds, now)

    def _set_limit(self, asked_at: float, seconds: float, now: float) -> None:
        self.limit = max(self.limit, asked_at + seconds - min(_MARGIN_MAX, seconds * _MARGIN_SHARE))
        left = self.limit - now
        self._extend_at = now if left < seconds * _EXTEND_SHARE else now + left * _EXTEND_SHARE

    # ------------------------------------------------------------ what follows

    @property
    def _complete(self) -> bool:
        """All blocks of the prompt have been announced."""
        return self._announced >= self._num_tokens

    @property
    def _wants_more_time(self) -> bool:
        stuck = self._num_reads and self._extend_at - self._progress > _PATIENCE * self._term
        return not self._extending and not stuck

    def _next(self, now: float) -> list[Action]:
        if self.phase is Phase.CONFIRMED:
            return [KVConfirmed(self.rid, self.outputs)]
        if self.phase is not Phase.READING:
            return []
        if self._complete and not self._num_reads and not self._to_read:
            self.phase = Phase.CONFIRMING
            return [Ask.RELEASE]
        if now >= self.limit and self._num_reads:
            raise ReadFailed(f"reading took longer than the {self.limit - self._progress:.3g} s that the lease left")
        actions: list[Action] = []
        if self._to_read and self.limit - now >= min(_ANSWER_MAX, self._term * _ANSWER_SHARE):
            actions += self._to_read
            self._num_reads += len(self._to_read)
            self._to_read.clear()
            self._progress = now
        if now >= self._extend_at and self._wants_more_time:
            self._extending = True
            actions.append(Ask.EXTEND)
        return actions
