"""The rate limit of refused API keys, per network of clients. Valid keys are never limited by it."""

from __future__ import annotations

from collections import OrderedDict

from router.gate.keys import network_of
from router.gate.rate_limits import TokenBucket

PER_MINUTE = 60  # refused keys of a network, which is an IPv4 address or an IPv6 /64
MAX_NETWORKS = 4096  # networks to remember, the latest ones


class RefusedKeys:
    """Callers pass in times: seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._buckets = OrderedDict[str, TokenBucket]()  # the latest last

    def count(self, address: str, now: float) -> float:
        """Count a refused key. Return the seconds until another is allowed; 0 if this one was within the limit."""
        network = network_of(address)
        bucket = self._buckets.setdefault(network, TokenBucket(PER_MINUTE, now))
        self._buckets.move_to_end(network)
        if len(self._buckets) > MAX_NETWORKS:
            self._buckets.popitem(last=False)
        wait = bucket.wait_for(1, now)
        if not wait:
            bucket.take(1, now)
        return wait
