"""The rate limits of one client, as token buckets, and OpenAI's headers about them."""

from __future__ import annotations

import math

from pdserve.errors import plain
from router.errors import RateLimitExceeded
from router.gate.admission_queue import RecentMean
from router.gate.keys import Client

_MINUTE = 60.0
Headers = list[tuple[bytes, bytes]]


class TokenBucket:
    """Holds at most ``per_minute`` and refills at that rate. Callers pass in times: seconds of one monotonic clock.

    The level may fall below zero, because the cost of a request is known only at its end.
    """

    __slots__ = ("_level", "_updated_at", "per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._updated_at = now

    def level(self, now: float) -> float:
        return min(self.per_minute, self._level + (now - self._updated_at) * self.per_minute / _MINUTE)

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount
        self._updated_at = now

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds ``amount``; an amount beyond its size waits for a full bucket."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing * _MINUTE / self.per_minute)

    def resize(self, per_minute: float, now: float) -> None:
        used = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = per_minute - used
        self._updated_at = now


class RateLimits:
    """Usage of one client against its limits. Callers pass in times: seconds of one monotonic clock."""

    def __init__(self, client: Client, now: float) -> None:
        self.running = 0
        self._duration = RecentMean()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.update(client, now)

    def update(self, client: Client, now: float) -> None:
        """Apply changed limits; past usage counts on."""
        self.client = client
        self._requests = _bucket(self._requests, client.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, client.tokens_per_minute, now)

    def start_request(self, now: float) -> None:
        """Count a request until ``finish_request``. Raises RateLimitExceeded."""
        limit = self.client.max_concurrent
        if limit is not None and self.running >= limit:
            wait = self._duration.mean / limit
            raise self._exceeded(f"{self.running} requests of this key are running, the limit is {limit}", wait, now)
        if self._requests is not None:
            if wait := self._requests.wait_for(1, now):
                text = f"this key may send {plain(self._requests.per_minute)} requests per minute"
                raise self._exceeded(text, wait, now)
            self._requests.take(1, now)
        self.running += 1

    def finish_request(self, seconds: float) -> None:
        self.running -= 1
        self._duration.add(seconds)

    def reserve_prompt(self, num_tokens: int, now: float) -> None:
        """Count prompt tokens. Raises RateLimitExceeded if the tokens per minute do not allow them now."""
        if self._tokens is None:
            return
        if wait := self._tokens.wait_for(num_tokens, now):
            text = f"this key may use {plain(self._tokens.per_minute)} tokens per minute, the prompt has {num_tokens}"
            raise self._exceeded(text, wait, now)
        self._tokens.take(num_tokens, now)

    def add_usage(self, num_tokens: int, now: float) -> None:
        """Count tokens without a check, such as output. An overdraft delays the next prompt."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def headers(self, now: float) -> Headers:
        """OpenAI's ``x-ratelimit-*`` headers of the limits that are set."""
        headers: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                remaining = b"%d" % math.floor(max(0.0, bucket.level(now)))
                reset = b"%.3gs" % bucket.wait_for(bucket.per_minute, now)
                values = {b"limit": b"%d" % bucket.per_minute, b"remaining": remaining, b"reset": reset}
                headers += [(b"x-ratelimit-%b-%b" % (kind, name), value) for kind, value in values.items()]
        return headers

    def _exceeded(self, limit: str, wait: float, now: float) -> RateLimitExceeded:
        return RateLimitExceeded(f"{limit}; retry in {math.ceil(wait) or 1} s", wait, self.headers(now))


def _bucket(previous: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if previous is None:
        return TokenBucket(per_minute, now)
    previous.resize(per_minute, now)
    return previous
