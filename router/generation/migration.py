"""A prompt whose decode node fails, or ends, goes on at another one, behind the tokens that are here already.

    runs at a D ──the D is lost, says that it failed, or drains──► waits for another D ──► runs there
                                                                       │ too many have failed, or nobody
                                                                       ▼ takes it in time
                                                                     an error

A node that drains has not failed, and no request is to blame for it: that counts towards no limit.

The noise of sampling depends on the seed, the choice and the position only, penalties are counted over the tokens sent
along, and text exists only in the router. So the client reads what it would have read anyway. Of a node that a prompt
has left nothing is heard any more: each token comes once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter

from pdserve.errors import Draining, NodeError, Overloaded, PdserveError
from pdserve.logs import request_fields
from pdserve.tracing.spans import Attributes, Span
from router.fleet.fleet import NodePair
from router.fleet.node_call import NodeLost
from router.fleet.policy import NodeView
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds in which a decode node must have taken it, since it left the last one
_AVOIDED = 2.0  # seconds for which those that it left are left alone: it takes a while until one that is ill says so
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between attempts

Accepts = Callable[[NodeView], bool]


class Migration:
    """Of one prompt; from nodes that failed ``limit`` times at most: one that kills its nodes must not kill them all.

    ``send`` starts the prompt at a decode node that is accepted, behind its tokens, or raises PdserveError.
    ``give_up`` is told the error that the client is to see.
    """

    def __init__(
        self,
        request_id: str,
        span: Span,
        limit: int,
        metrics: RouterMetrics,
        send: Callable[[Accepts], None],
        give_up: Callable[[PdserveError], None],
    ) -> None:
        self._request_id = request_id
        self._span = span  # the request's
        self._limit = limit
        self._metrics = metrics
        self._send = send
        self._give_up = give_up
        self._left: set[str] = set()  # ids of decode nodes that it was at
        self._left_at = 0.0  # the latest
        self._num_failures = 0
        self._moved = False  # from a node without room to another
        self._like: NodeView | None = None  # whom it has tokens of: a node of another kind may compute other ones
        self._reason: PdserveError | None = None
        self._pause = _FIRST_PAUSE
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def cancel(self) -> None:
        """Nobody waits for it any more: it lets go of whom it has served. Idempotent."""
        self._over = True
        self._send = self._give_up = _nobody
        if self._timer is not None:
            self._timer.cancel()

    def on_failure(self, error: PdserveError, call: NodePair, num_tokens: int) -> None:
        """The call has ended, with ``num_tokens`` of output here: have the prompt go on elsewhere, or give up."""
        if self._over:
            return
        if isinstance(error, Draining):
            self._leave(call.node, num_tokens, error, "drained")
        elif isinstance(error, NodeError) and self._limit:
            self._node_failed(error, call.node, num_tokens)
        elif isinstance(error, Overloaded) and self._left:
            self._try_later()  # it has begun already: a node without room is no reason to end it
        elif not (isinstance(error, Overloaded) and self._ask_another(call.node)):
            self._give_up(error)

    def _ask_another(self, full: NodeView) -> bool:
        """A request that has not begun asks another node, once, when one has no room. False where there is none."""
        if self._moved:
            return False
        self._moved = True
        try:
            self._send(lambda node: node.node_id != full.node_id)
        except PdserveError:  # what the first one said is what counts
            return False
        return True

    def _node_failed(self, error: NodeError, node: NodeView, num_tokens: int) -> None:
        self._num_failures += 1
        if self._num_failures > self._limit:
            text = f"{self._num_failures} decode nodes failed under this request, the limit is {self._limit + 1}"
            self._give_up(NodeError(f"{text}; the last one: {error}"))
            return
        self._leave(node, num_tokens, error, "lost" if isinstance(error, NodeLost) else "failed")

    def _leave(self, node: NodeView, num_tokens: int, error: PdserveError, why: str) -> None:
        """Have it go on at another node."""
        level = logging.INFO if why == "drained" else logging.WARNING
        text = "request %s goes on elsewhere, behind %d tokens: %s"
        logger.log(
            level,
            text,
            self._request_id,
            num_tokens,
            error,
            extra=request_fields(self._request_id, self._span.trace_id),
        )
        told: Attributes = {
            "pdserve.decode_node": node.node_id,
            "pdserve.migration.reason": why,
            "pdserve.replayed_tokens": num_tokens,
        }
        self._span.event("migration", told)
        self._metrics.migrations.labels(why).inc()
        self._metrics.replayed_tokens.inc(num_tokens)
        self._left.add(node.node_id)
        self._left_at = perf_counter()
        self._like = node if num_tokens else None
        self._reason, self._pause = error, _FIRST_PAUSE
        self._try()

    def _accepts(self, node: NodeView) -> bool:
        like = self._like
        if like is not None and (node.compat_hash, node.version) != (like.compat_hash, like.version):
            return False
        return node.node_id not in self._left or perf_counter() > self._left_at + _AVOIDED

    def _try(self) -> None:
        try:
            self._send(self._accepts)
        except PdserveError:  # nobody is there
            self._try_later()

    def _try_later(self) -> None:
        if perf_counter() > self._left_at + _PATIENCE:
            kind = Overloaded if isinstance(self._reason, Draining) else NodeError
            self._give_up(kind(f"no other decode node took the request within {_PATIENCE:g} s: {self._reason}"))
            return
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._try)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _nobody(_: object) -> None:
    """In place of a prompt that is gone."""
