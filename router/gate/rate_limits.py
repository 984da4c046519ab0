"""What one client may still ask for, and what it is told about that."""

from __future__ import annotations

import math

from router.errors import RateLimitExceeded
from router.gate.admission_queue import Stays
from router.gate.keys import Client
from router.gate.token_bucket import TokenBucket

Headers = list[tuple[bytes, bytes]]


class RateLimits:
    """The limits of one client at work. Times are seconds of one clock, which callers pass in."""

    def __init__(self, client: Client, now: float) -> None:
        self.client = client
        self.running = 0
        self._stays = Stays()
        self._requests = _bucket(None, client.requests_per_minute, now)
        self._tokens = _bucket(None, client.tokens_per_minute, now)

    def update(self, client: Client, now: float) -> None:
        """Take on limits that have changed; what was used stays used."""
        self.client = client
        self._requests = _bucket(self._requests, client.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, client.tokens_per_minute, now)

    def enter(self, now: float) -> None:
        """Count a request, until ``leave``. Raises RateLimitExceeded where it is one too many."""
        limit = self.client.max_concurrent
        if limit is not None and self.running >= limit:
            wait = self._stays.mean / limit
            raise self._exceeded(f"{self.running} requests of this key are under way, its limit is {limit}", wait, now)
        if self._requests is not None and (wait := self._requests.wait_for(1, now)):
            raise self._exceeded(f"this key may send {self._requests.per_minute:g} requests per minute", wait, now)
        if self._requests is not None:
            self._requests.take(1, now)
        self.running += 1

    def leave(self, seconds: float) -> None:
        """A request that had entered has ended, after so long."""
        self.running -= 1
        self._stays.add(seconds)

    def take_prompt(self, num_tokens: int, now: float) -> None:
        """Raises RateLimitExceeded where the tokens per minute do not allow this prompt now."""
        if self._tokens is None:
            return
        if wait := self._tokens.wait_for(num_tokens, now):
            text = f"this key may use {self._tokens.per_minute:g} tokens per minute, the prompt has {num_tokens}"
            raise self._exceeded(text, wait, now)
        self._tokens.take(num_tokens, now)

    def use(self, num_tokens: int, now: float) -> None:
        """Count tokens without asking, such as outputs; an overdraft is worked off before the next prompt."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def headers(self, now: float) -> Headers:
        """OpenAI's ``x-ratelimit-…`` of the limits there are."""
        found: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left = math.floor(max(0.0, bucket.level(now)))
                full = b"%.3gs" % bucket.wait_for(bucket.per_minute, now)
                for what, value in (
                    (b"limit", b"%d" % bucket.per_minute),
                    (b"remaining", b"%d" % left),
                    (b"reset", full),
                ):
                    found.append((b"x-ratelimit-" + what + b"-" + name, value))
        return found

    def _exceeded(self, what: str, wait: float, now: float) -> RateLimitExceeded:
        return RateLimitExceeded(f"{what}; come back in {math.ceil(wait) or 1} s", wait, self.headers(now))


def _bucket(before: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if before is None:
        return TokenBucket(per_minute, now)
    before.resize(per_minute, now)
    return before
