"""Attempts to have nodes do a piece of work: how many failures, how long, and which nodes are avoided meanwhile.

    runs ──its node fails──► waits: the node is avoided for 2 s, others are tried after 20, 40 … 500 ms ──► runs there
                               │ more failures than --migrations      │ 10 s have passed
                               └──────────────────────────────────────┴──► the client's error

The work is a prompt that migrates (router/generation/migration.py), or a batch of texts (router/pooling/run.py): they
decide what an error means, and when the next attempt begins.
"""

from __future__ import annotations

from time import monotonic

from pdserve.errors import EngineCrashed
from router.errors import MalformedOutput
from router.fleet.serve_stream import NodeLost

TIMEOUT = 10.0  # seconds from leaving a node until another one must have taken the work
LONGEST_PAUSE = 0.5  # seconds between attempts
_FIRST_PAUSE = 0.02
_AVOID = 2.0  # seconds to avoid a node: a failing node is not reported at once
_REASONS = ((EngineCrashed, "crashed"), (NodeLost, "lost"), (MalformedOutput, "malformed"))


def failure_reason(error: Exception) -> str:
    """Return the label of a node's failure in metrics."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "failed")


class AvoidedNodes:
    """The nodes that a request has left lately."""

    def __init__(self) -> None:
        self._left_at: dict[str, float] = {}  # by node id

    def add(self, node_id: str) -> None:
        self._left_at[node_id] = monotonic()

    def __contains__(self, node_id: object) -> bool:
        return node_id in self.ids

    @property
    def ids(self) -> list[str]:
        now = monotonic()
        return [node_id for node_id, left_at in self._left_at.items() if now < left_at + _AVOID]


class NodeAttempts:
    """The attempts of one piece of work, from its first failure."""

    def __init__(self, limit: int, avoided: AvoidedNodes, num_failures: int = 0) -> None:
        """``limit`` is how many failed nodes the work may leave; ``num_failures`` of them count already.

        Parts of a request may share the ``avoided`` nodes.
        """
        self.avoided = avoided
        self.num_failures = num_failures
        self._limit = limit
        self._pause = _FIRST_PAUSE
        self._give_up_at: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the work has left a node."""
        return self._give_up_at is not None

    @property
    def expired(self) -> bool:
        """Whether the time for attempts has passed."""
        return self._give_up_at is not None and monotonic() > self._give_up_at

    def count_failure(self) -> bool:
        """Count a node's failure; return whether another node may get the work."""
        self.num_failures += 1
        return self.num_failures <= self._limit

    def begin(self) -> None:
        """Begin the time and the pauses, as the work leaves a node."""
        self._pause = _FIRST_PAUSE
        self.allow_more_time()

    def allow_more_time(self) -> None:
        """Begin the time again, with pauses as long as they are."""
        self._give_up_at = monotonic() + TIMEOUT

    def next_pause(self, longest: float = LONGEST_PAUSE) -> float:
        """Return the seconds until the next attempt; those after it are twice as long, up to ``longest``."""
        pause = self._pause
        self._pause = min(2 * pause, longest)
        return pause
