"""Pulls the KV of a prompt's first tokens from a peer's prefix cache, on any node: the one reader of peers' caches.

    reserved ─► worth it? ─► leased by the source ─► read ─► confirmed ─► the rest is computed
                   │ no         │ nothing, refused, revoked, late, broken    ▲
                   └────────────┴────────────────────────────────────────────┘

``PullDriver`` asks the source, has the engine read, and confirms. ``PulledPrompt`` is the prompt that needs the KV:
P's is prefill_node/pulled_prefix.py, D's decode_node/pulled_generation.py.

A pull may be late, and fails then. Where it takes about as long as computation, the node computes the first tokens
meanwhile (``plan_pull``).
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

from node.context import NodeContext
from node.reading.handoff import Event
from node.reading.handoff_executor import HandoffExecutor
from node.reading.peer import KVPeer
from node.reading.peers import KVPeers
from pdserve.errors import PdserveError, PeerError
from pdserve.ipc.messages import ComputeBeside, KVConfirmed, ReadEnded, StartRead
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import Peer, ReadResult
from pdserve.request_cost import NO_PULL, LoadPlan

_log = logging.getLogger(__name__)


class Pull(NamedTuple):
    plan: LoadPlan  # NO_PULL: all tokens that the source has, however many these are
    patience: float  # seconds until the pull is late; infinity: never


class PulledPrompt(Protocol):
    """A prompt on this node that needs KV of a peer: which tokens, and how it goes on with them or without.

    Its methods are called in this order, each at most once but for the reads.
    """

    rid: int  # the engine's
    request_id: str
    num_tokens: int  # leading tokens that the source is asked for; this node computes those behind them

    def plan(self, cached_tokens: int) -> Pull | None:
        """Return the pull that is worth its time; None: compute the tokens.

        Blocks are reserved, and this node has KV of the first ``cached_tokens`` tokens.
        """

    def decline(self) -> None:
        """Have the engine compute the prompt: no pull is worth its time."""

    def ask(self, source: Peer) -> pb.PrefillRequest:
        """Begin the pull's span; return the request to the source. The driver adds what this node has."""

    def on_asked(self) -> None:
        """The request has been sent."""

    def on_read_started(self) -> None:
        """The engine has been told to read blocks."""

    def on_read_ended(self, read: ReadResult) -> None:
        """A read has ended."""

    def on_confirmed(self, confirmed: KVConfirmed, num_tokens: int) -> None:
        """Have the engine use the KV of ``num_tokens`` tokens that the pull brought; 0 or less: it brought none."""

    def on_failed(self, error: PdserveError) -> None:
        """Have the engine compute the prompt, or end it: nothing that was read will be used."""

    def on_abandoned(self) -> None:
        """The prompt has ended before its pull."""


class PullDriver(HandoffExecutor):
    """One pull, from the reservation of blocks to its end. An error ends it, and the prompt decides what follows."""

    def __init__(self, node: NodeContext, peers: KVPeers, source: KVPeer, prompt: PulledPrompt) -> None:
        super().__init__(node, source, prompt.rid)
        self._metrics = peers.metrics
        self._peers = peers
        self._prompt = prompt
        self._cached_tokens = 0  # on this node
        self._plan = NO_PULL

    def abandon(self) -> None:
        if not self._ended:
            super().abandon()
            self._prompt.on_abandoned()

    def _start(self, cached_tokens: int) -> None:
        pull = self._prompt.plan(cached_tokens)
        if pull is None:
            self._ended = True
            self._prompt.decline()
            return
        stream = self._open_stream()
        self._cached_tokens = cached_tokens
        self._plan = pull.plan
        present = cached_tokens + self._plan.computed
        if self._plan.computed:
            self._engine.send(ComputeBeside(self._rid, present))
        request = self._prompt.ask(stream.peer)
        request.cached_only = True
        self._begin(request, present, self._prompt.num_tokens, patience=pull.patience)
        self._prompt.on_asked()

    def _advance(self, event: Event) -> None:
        if isinstance(event, ReadEnded):
            self._prompt.on_read_ended(event.result)
        super()._advance(event)

    def _start_read(self, order: StartRead) -> None:
        self._prompt.on_read_started()
        super()._start_read(order)

    def _confirm(self, confirmed: KVConfirmed) -> None:
        self._ended = True
        num_tokens = confirmed.num_tokens - self._cached_tokens - self._plan.computed
        self._metrics.count_pull(num_tokens, self._peers.costs, self._seconds, computed=self._plan.computed)
        self._prompt.on_confirmed(confirmed, num_tokens)

    def _fail(self, error: PdserveError) -> None:
        self._ended = True
        self._metrics.count_failed_pull(error, self._seconds)
        self._give_up()
        self._check_peer(error)
        self._prompt.on_failed(error)

    def _on_exception(self, error: Exception) -> None:
        _log.exception("the pull for request %s failed", self._prompt.request_id or self._rid)
        if not self._ended:
            self._fail(PeerError(f"the pull failed: {error}"))
