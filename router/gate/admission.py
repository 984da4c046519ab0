"""Admission: which requests run, wait or are rejected, and with which Retry-After."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from pdserve.errors import DeadlineExceeded, Draining, Overloaded
from router.errors import ClientDisconnected
from router.gate.admission_queue import AdmissionQueue, RecentMean, Ticket
from router.gate.keys import Client, fairness_key
from router.gate.rate_limits import Headers, RateLimits
from router.metrics import RouterMetrics


class AdmissionController:
    """``max_inflight`` requests run, ``max_queue`` wait, and ``max_inflight`` more may be arriving.

    Arriving requests have a bound of their own, because the priority is known only after the body has been read. It is
    an eighth higher for clients with few requests.
    """

    def __init__(self, max_inflight: int, max_queue: int, metrics: RouterMetrics) -> None:
        self._queue = AdmissionQueue(max_inflight, max_queue)
        self._max_arriving = max_inflight
        self._metrics = metrics
        self._output = RecentMean()  # output tokens of a choice
        self._secret = os.urandom(16)
        self._rate_limits: dict[str, RateLimits] = {}  # by client name
        self._requests: set[RequestAdmission] = set()
        self._by_client = Counter[str]()  # requests
        self._empty = asyncio.Event()
        self._closed = False
        metrics.waiting.set_function(lambda: self._queue.num_waiting)

    @property
    def num_requests(self) -> int:
        """Requests that arrive, wait or run."""
        return len(self._requests)

    def close(self) -> None:
        """Reject new requests; running and waiting ones stay. Idempotent."""
        self._closed = True

    def abort(self) -> None:
        """Reject new and waiting requests."""
        self.close()
        self._queue.fail_waiting(_draining())

    async def wait_empty(self) -> None:
        """Return once no request is left. Call it after ``close``."""
        if self._requests:
            await self._empty.wait()

    @contextmanager
    def enter(self, client: Client, address: str) -> Iterator[RequestAdmission]:
        """Count a request whose body has not been read. Raises Overloaded or RateLimitExceeded.

        ``address``: IP address of the client, which tells clients without API keys apart.
        """
        if self._closed:
            raise _draining()
        arriving = len(self._requests) - self._queue.num_admitted - self._queue.num_waiting
        key = fairness_key(client, address)
        extra = self._max_arriving // 8 if self._by_client[key] < max(1, self._max_arriving // 64) else 0
        if arriving >= self._max_arriving + extra:
            text = f"{arriving} requests are arriving, the limit is {self._max_arriving}; retry later"
            raise Overloaded(text, self._queue.expected_wait(self._queue.num_waiting))
        arrived = perf_counter()
        limits = self._limits_of(client, arrived)
        limits.start_request(arrived)
        client_tag = int.from_bytes(hashlib.blake2b(key.encode(), key=self._secret, digest_size=8).digest())
        request = RequestAdmission(key, client_tag, self._queue, limits, self._output, self._metrics)
        self._requests.add(request)
        self._by_client[key] += 1
        self._empty.clear()
        self._metrics.in_flight.inc()
        try:
            yield request
        finally:
            now = perf_counter()
            request.release(now)
            limits.finish_request(now - arrived)
            self._metrics.in_flight.dec()
            self._requests.discard(request)
            self._by_client[key] -= 1
            if not self._by_client[key]:
                del self._by_client[key]
            if not self._requests:
                self._empty.set()

    def _limits_of(self, client: Client, now: float) -> RateLimits:
        """The client's rate limits. Past usage survives a change of the limits."""
        limits = self._rate_limits.setdefault(client.name, RateLimits(client, now))
        if limits.client is not client:
            limits.update(client, now)
        return limits


class RequestWork(NamedTuple):
    """Tokens of a request: of its prompts, and at most of all its choices; it has none if no token is sampled."""

    prompt_tokens: int
    max_output: int = 0
    num_choices: int = 0


class Idle(NamedTuple):
    """A function to call after each ``seconds`` of a wait; 0: never."""

    seconds: float
    call: Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """Do nothing."""


NEVER_IDLE = Idle(0.0, _nothing)


class RequestAdmission:
    """One request. ``client_tag`` tells clients apart at the nodes, which learn no names and no addresses."""

    def __init__(
        self,
        client: str,
        client_tag: int,
        queue: AdmissionQueue,
        limits: RateLimits,
        output: RecentMean,
        metrics: RouterMetrics,
    ) -> None:
        self.client_tag = client_tag
        self._client = client
        self._queue = queue
        self._limits = limits
        self._output = output
        self._metrics = metrics
        self._ticket: Ticket | None = None
        self._work = RequestWork(0)
        self._num_choices = 0
        self._expected_output = 0  # tokens

    @property
    def owner(self) -> str:
        """The owner of the responses that the request stores and reads."""
        return self._limits.client.owner

    def clamp_priority(self, priority: int) -> int:
        best = self._limits.client.best_priority
        return priority if best is None else max(priority, best)

    def cache_salt(self, salt: str) -> str:
        return self._limits.client.cache_salt(salt)

    def reserve(self, work: RequestWork) -> Headers:
        """Count the prompt in the client's rate limits, and return their headers. Raises RateLimitExceeded."""
        now = perf_counter()
        self._limits.reserve_prompt(work.prompt_tokens, now)
        self._work = work
        return self._limits.headers(now)

    async def wait_for_slot(
        self, priority: int, timeout: float, disconnected: asyncio.Future[None], idle: Idle = NEVER_IDLE
    ) -> None:
        """Wait for a slot at the nodes, kept until ``release``. Call it after ``reserve``, once.

        ``timeout`` is in seconds. Raises Overloaded, DeadlineExceeded or ClientDisconnected.
        """
        work = self._work
        self._num_choices = work.num_choices
        self._expected_output = min(work.max_output, round(work.num_choices * self._output.mean))
        started = perf_counter()
        decision: asyncio.Future[Overloaded | None] = asyncio.get_running_loop().create_future()
        try:
            ticket = Ticket(self._client, priority, work.prompt_tokens + self._expected_output, decision.set_result)
            self._queue.join(ticket, timeout, started)
            self._ticket = ticket
            if not ticket.admitted:
                await _first_of(decision, disconnected, timeout, idle)
                if disconnected.done():
                    raise ClientDisconnected
                if not decision.done():
                    raise DeadlineExceeded(f"no slot was free within {timeout:.3g} s; retry later")
                if (error := decision.result()) is not None:
                    raise error
        except BaseException:
            self._limits.add_usage(-work.prompt_tokens, perf_counter())  # the prompt is not computed
            raise
        self._metrics.queued.observe(perf_counter() - started)
        self._metrics.count_key_tokens(self._limits.client.name, "prompt", work.prompt_tokens)

    def record_output(self, num_tokens: int, cached_tokens: int) -> None:
        """Count the output tokens of a request that ran, and correct its cost; cached prompt tokens cost nothing."""
        if self._num_choices:
            self._output.add(num_tokens / self._num_choices)
        self._queue.charge(self._client, num_tokens - self._expected_output - cached_tokens)
        self._limits.add_usage(num_tokens, perf_counter())
        self._metrics.count_key_tokens(self._limits.client.name, "output", num_tokens)

    def release(self, now: float) -> None:
        if self._ticket is not None:
            self._queue.leave(self._ticket, now)


async def _first_of(one: asyncio.Future[Any], other: asyncio.Future[Any], timeout: float, idle: Idle) -> None:
    """Wait until one of two futures is done, or for ``timeout`` seconds."""
    ends = perf_counter() + timeout
    while (left := ends - perf_counter()) > 0:
        wait = min(left, idle.seconds) if idle.seconds > 0 else left
        done, _ = await asyncio.wait((one, other), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        if wait < left:
            await idle.call()


def _draining() -> Draining:
    return Draining("the router is shutting down; use another router")
