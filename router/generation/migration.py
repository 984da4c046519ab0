"""Migration: when its decode node fails or drains, a prompt continues on another one, behind the tokens so far.

    runs on a D ──stream lost, NODE_FAILED, malformed output, stalled, or draining──► waits for another D ──► runs there
       │   ▲                                                   │ too many failures, or no D
       │   └─ refused: any D, the first one included           ▼ accepts it in time
       └──moved──► another D, which pulls the KV from the first one         an error

If the engine of D, or of its P, ends in a step with the prompt, the prompt is suspect (suspicion.py).

If a node lacks pixels of the prompt's images, the router sends them again, with the prompt, to any node. A decode node
that has read KV without pixels, by a move, lacks them if it has to compute the prompt after all.

A drain is no failure and counts towards no limit, nor does a move. A move begins behind the next token of the
prompt. The call to its first node ends before that to the second one begins, so that two nodes never produce tokens of
one prompt. Its blocks stay in the first node's prefix cache, as the last ones to be evicted, until the second node has
leased them.

The client receives the same tokens as without migration: sampling noise depends only on seed, choice and position,
penalties are computed from the tokens sent along, and text exists only in the router. Outputs of a node that the prompt
has left are ignored, so each token arrives once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from pdserve.errors import (
    AdapterMissing,
    DeadlineExceeded,
    Draining,
    EngineCrashed,
    ImagesMissing,
    NodeError,
    Overloaded,
    PdserveError,
)
from router.errors import CrashingRequest
from router.fleet.fleet import NodeCall
from router.fleet.node_attempts import LONGEST_PAUSE, TIMEOUT, AvoidedNodes, NodeAttempts, failure_reason
from router.fleet.policy import NodeView, Placement
from router.generation.job import GenerationOptions
from router.generation.suspicion import Suspicion
from router.metrics import ModelMetrics

logger = logging.getLogger(__name__)

_TURN_PAUSE = 0.05  # seconds between attempts of a suspect while others are on trial
_REST = 5.0  # seconds between two moves of a stream
_MOST_IMAGES_MISSING = 3  # times that nodes may lack images of a prompt without a new token; each may take 10 s
_LEVELS = {"drained": logging.INFO, "moved": logging.DEBUG}  # log level by reason; other reasons: WARNING

Accepts = Callable[[NodeView], bool]


class Migration:
    """Moves one prompt. Failures are limited: a request that crashes nodes must not crash all of them.

    ``send`` starts the prompt on an accepted decode node, or on a named pair, or raises PdserveError; with True, it is
    on trial there. ``give_up`` takes the client's error.
    """

    def __init__(
        self,
        options: GenerationOptions,
        metrics: ModelMetrics,
        send: Callable[[Accepts | Placement, bool], None],
        give_up: Callable[[PdserveError], None],
        num_choices: int,
    ) -> None:
        self._options = options
        self._metrics = metrics
        self._send = send
        self._give_up = give_up
        self._attempts = NodeAttempts(options.migrations, AvoidedNodes())
        self.destination: Placement | None = None  # destination of the move after the next token
        self.suspicion = Suspicion(num_choices)
        self._waits_for_turn = False  # only nodes with other suspects are ready
        self._left_stalled = False
        self._images_missing = 0  # times that a node lacked images, since the newest token
        self._tokens_when_missing = 0  # output tokens at the last of these times
        self._rerouted = False  # the prompt was moved from a node without room
        self._moving = False  # the present call is believed to be a move
        self._moved_at = -_REST
        self._computed_by: NodeView | None = None  # node of the tokens so far; another kind may continue differently
        self._reason: PdserveError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Stop, and drop the references to the prompt. Idempotent."""
        self._cancelled = True
        self.suspicion.end_trial()
        self._send = self._give_up = _ignore
        if self._timer is not None:
            self._timer.cancel()

    def on_failure(self, error: PdserveError, call: NodeCall, num_tokens: int) -> None:
        """Continue the prompt elsewhere after the end of a call, or give up. ``num_tokens`` of output have arrived."""
        if self._cancelled:
            return
        moving = self._moving
        self._moving = False
        if isinstance(error, EngineCrashed) and self._options.migrations:
            self._on_crash(error, call, num_tokens)
            return
        self.suspicion.end_trial()
        if isinstance(error, Draining):
            self._leave(call.node, num_tokens, error, "drained")
        elif isinstance(error, AdapterMissing):
            self._leave(call.node, num_tokens, error, "adapter")
        elif isinstance(error, ImagesMissing):
            self._on_images_missing(call.node, num_tokens, error)
        elif isinstance(error, NodeError) and self._options.migrations:
            self._on_node_failure(error, call.node, num_tokens)
        elif isinstance(error, Overloaded) and moving:
            self._go_elsewhere(call.node, error)
        elif isinstance(error, Overloaded) and self._attempts.begun:
            self._retry_later()  # a request that has begun waits for room
        elif not (isinstance(error, Overloaded) and self._reroute(call.node)):
            self._give_up(error)

    def may_leave(self, node: NodeView, num_tokens: int, exists: Callable[[Accepts], bool]) -> bool:
        """Return whether a prompt may leave a node that has not failed: once, as the prompt may be the cause.

        ``exists`` returns whether an accepted decode node could take the prompt.
        """
        if self._cancelled or not self._options.migrations or self._left_stalled:
            return False
        self._computed_by = node if num_tokens else None
        return exists(lambda other: other.node_id != node.node_id and self._accepts(other))

    @property
    def may_move(self) -> bool:
        if self._cancelled or not self._options.migrations or self.suspicion.crashed or self.destination is not None:
            return False
        return monotonic() > self._moved_at + _REST

    def move(self, node: NodeView, num_tokens: int) -> None:
        """Continue at ``destination``, which reads the KV from ``node``; if that is refused, anywhere."""
        to = self.destination
        self.destination = None
        assert to is not None
        self._count(node, num_tokens, f"to {to.decode}", "moved")
        self._computed_by = node
        self._moving = True
        self._moved_at = monotonic()
        self._attempts.begin()
        self._reason = Overloaded(f"{to.decode} did not take it")
        try:
            self._send(to, False)
        except PdserveError:
            self._moving = False
            self._try()

    def leave_stalled(self, node: NodeView, num_tokens: int) -> None:
        """Continue elsewhere, since a step of the node may never end. This counts as no failure, towards no limit."""
        self.suspicion.end_trial()
        self._left_stalled = True
        self._leave(node, num_tokens, NodeError(f"decode node {node.node_id} is stalled in a step"), "stalled")

    def _reroute(self, full: NodeView) -> bool:
        """Try another node, once, if the first one has no room. Return False if no other node takes the prompt."""
        if self._rerouted:
            return False
        self._rerouted = True
        try:
            self._send(lambda node: node.node_id != full.node_id, False)
        except PdserveError:  # the client gets the first node's error
            return False
        return True

    def _on_crash(self, error: EngineCrashed, call: NodeCall, num_tokens: int) -> None:
        """Go on elsewhere, on trial unless another request explains the crash; fail after the second one."""
        try:
            self.suspicion.add_crash(call, error)
        except CrashingRequest as exc:
            self._give_up(exc)
        else:
            self._on_node_failure(error, call.node, num_tokens)

    def _on_node_failure(self, error: NodeError, node: NodeView, num_tokens: int) -> None:
        if not self._attempts.count_failure():
            num_failures = self._attempts.num_failures
            limit = self._options.migrations + 1
            text = f"{num_failures} decode nodes failed under this request, the limit is {limit}"
            self._give_up(NodeError(f"{text}; the last one: {error}"))
            return
        self._leave(node, num_tokens, error, failure_reason(error))

    def _on_images_missing(self, node: NodeView, num_tokens: int, error: ImagesMissing) -> None:
        """Send the prompt again, and its images with it, to any node: the present one has not failed.

        A node that encodes no images lacks them whenever it preempts the prompt, which may happen often.
        """
        if num_tokens != self._tokens_when_missing:
            self._tokens_when_missing = num_tokens
            self._images_missing = 0
        self._images_missing += 1
        if self._images_missing > _MOST_IMAGES_MISSING:
            times = self._images_missing
            text = f"nodes lacked the images {times} times without a new token, the limit is {_MOST_IMAGES_MISSING}"
            self._give_up(NodeError(f"{text}; the last time: {error}"))
            return
        self._count(node, num_tokens, str(error), "images")
        self._metrics.replayed_tokens.inc(num_tokens)
        self._computed_by = node if num_tokens else None
        self.destination = None
        self._attempts.begin()
        self._reason = error
        self._retry_later()

    def _leave(self, node: NodeView, num_tokens: int, error: PdserveError, why: str) -> None:
        self._count(node, num_tokens, str(error), why)
        self._metrics.replayed_tokens.inc(num_tokens)
        self._computed_by = node if num_tokens else None
        self._go_elsewhere(node, error)

    def _count(self, node: NodeView, num_tokens: int, text: str, why: str) -> None:
        """Log and count a migration from ``node``."""
        level = _LEVELS.get(why, logging.WARNING)
        options = self._options
        line = "request %s leaves decode node %s with %d output tokens: %s"
        logger.log(level, line, options.request_id, node.node_id, num_tokens, text, extra=options.log_fields)
        where = {"pdserve.decode_node": node.node_id, "pdserve.migration.reason": why}
        self._options.span.event("migration", {**where, "pdserve.replayed_tokens": num_tokens})
        self._metrics.migrations.labels(why).inc()

    def _go_elsewhere(self, node: NodeView, error: PdserveError) -> None:
        self.destination = None
        self._attempts.avoided.add(node.node_id)
        self._attempts.begin()
        self._reason = error
        self._try()

    def _accepts(self, node: NodeView) -> bool:
        before = self._computed_by
        if before is not None and not node.is_compatible(before):
            return False
        if node.node_id in self._attempts.avoided:
            return False
        self._waits_for_turn |= node.has_suspect
        return self.suspicion.accepts(node)

    def _try(self) -> None:
        self._waits_for_turn = False
        try:
            self._send(self._accepts, self.suspicion.pending)
        except PdserveError:  # no accepted node is ready
            self._retry_later()

    def _retry_later(self) -> None:
        if self._options.remaining <= 0:
            self._give_up(DeadlineExceeded(f"no other decode node took the request in its time: {self._reason}"))
            return
        if self.suspicion.pending and self._waits_for_turn:
            self._attempts.allow_more_time()
        elif self._attempts.expired:
            kind = Overloaded if isinstance(self._reason, Draining | Overloaded) else NodeError
            self._give_up(kind(f"no other decode node took the request within {TIMEOUT:g} s: {self._reason}"))
            return
        pause = self._attempts.next_pause(_TURN_PAUSE if self._waits_for_turn else LONGEST_PAUSE)
        self._timer = asyncio.get_running_loop().call_later(pause, self._try)


def _ignore(*_: object) -> None:
    """Replaces the callbacks of a cancelled prompt."""
