"""Admission: how many requests run and wait, in which order, and who is sent away with which Retry-After."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from pdserve.errors import DeadlineExceeded, Draining, Overloaded
from router.errors import ClientDisconnected
from router.gate.admission_queue import AdmissionQueue, Ticket
from router.gate.keys import Client
from router.gate.rate_limits import Headers, RateLimits
from router.metrics import RouterMetrics


class Gate:
    """``max_inflight`` requests run at once and ``max_queue`` wait; as many as may run may be still on their way in.

    Those on their way in are bounded apart, since an urgent one is known as such only when its body has been read.
    """

    def __init__(self, max_inflight: int, max_queue: int, metrics: RouterMetrics) -> None:
        self._line = AdmissionQueue(max_inflight, max_queue)
        self._max_arriving = max_inflight
        self._metrics = metrics
        self._allowances: dict[str, RateLimits] = {}  # by name of the client
        self._visits: set[Visit] = set()
        self._empty = asyncio.Event()
        self._closed = False
        metrics.waiting.set_function(lambda: self._line.num_waiting)

    def close(self) -> None:
        """Let nobody in from now on; who is inside stays, waiting or not. Idempotent."""
        self._closed = True

    def dismiss(self) -> None:
        """Let nobody in from now on, and send away who waits."""
        self.close()
        self._line.dismiss(_draining())

    async def empty(self) -> None:
        """Returns once no request is inside; for use after ``close``."""
        if self._visits:
            await self._empty.wait()

    @contextmanager
    def enter(self, client: Client) -> Iterator[Visit]:
        """A request whose body is yet to be read. Raises Overloaded or RateLimitExceeded."""
        if self._closed:
            raise _draining()
        arriving = len(self._visits) - self._line.num_admitted - self._line.num_waiting
        if arriving >= self._max_arriving:
            text = f"{arriving} requests are being read, the limit is {self._max_arriving}; come back later"
            raise Overloaded(text, self._line.expected_wait(self._line.num_waiting))
        arrived = perf_counter()
        allowance = self._allowance(client, arrived)
        allowance.enter(arrived)
        visit = Visit(self._line, allowance, self._metrics)
        self._visits.add(visit)
        self._empty.clear()
        self._metrics.in_flight.inc()
        try:
            yield visit
        finally:
            now = perf_counter()
            visit.end(now)
            allowance.leave(now - arrived)
            self._metrics.in_flight.dec()
            self._visits.discard(visit)
            if not self._visits:
                self._empty.set()

    def _allowance(self, client: Client, now: float) -> RateLimits:
        """Kept when the limits of a client change, so that what it has used counts on."""
        found = self._allowances.get(client.name)
        if found is None:
            found = self._allowances[client.name] = RateLimits(client, now)
        elif found.client is not client:
            found.update(client, now)
        return found


class Visit:
    """One request inside the gate."""

    def __init__(self, line: AdmissionQueue, allowance: RateLimits, metrics: RouterMetrics) -> None:
        self._line = line
        self._allowance = allowance
        self._metrics = metrics
        self._ticket: Ticket | None = None

    def priority(self, wanted: int) -> int:
        """What counts of the priority that a request has given itself."""
        best = self._allowance.client.best_priority
        return wanted if best is None else max(wanted, best)

    async def admit(
        self, priority: int, num_tokens: int, patience: float, client_gone: asyncio.Future[None]
    ) -> Headers:
        """Returns once the request has a place at the nodes, which it keeps to its end, with headers for its response.

        ``num_tokens`` are its prompts', ``patience`` is in seconds. Raises RateLimitExceeded, Overloaded,
        DeadlineExceeded or ClientDisconnected.
        """
        started = perf_counter()
        self._allowance.take_prompt(num_tokens, started)
        turn: asyncio.Future[Overloaded | None] = asyncio.get_running_loop().create_future()
        try:
            self._ticket = self._line.join(priority, patience, started, turn.set_result)
            if not self._ticket.admitted:
                await _wait(turn, patience, client_gone)
        except BaseException:
            self._allowance.use(-num_tokens, perf_counter())  # of which nothing came
            raise
        self._metrics.queued.observe(perf_counter() - started)
        self._count(num_tokens, "prompt")
        return self._allowance.headers(started)

    def used(self, num_tokens: int) -> None:
        """Output tokens, once it is known how many they are."""
        self._allowance.use(num_tokens, perf_counter())
        self._count(num_tokens, "output")

    def _count(self, num_tokens: int, kind: str) -> None:
        if name := self._allowance.client.name:
            self._metrics.key_tokens.labels(name, kind).inc(num_tokens)

    def end(self, now: float) -> None:
        if self._ticket is not None:
            self._line.leave(self._ticket, now)


async def _wait(turn: asyncio.Future[Overloaded | None], patience: float, client_gone: asyncio.Future[None]) -> None:
    await asyncio.wait((turn, client_gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    if client_gone.done():
        raise ClientDisconnected
    if not turn.done():
        raise DeadlineExceeded(f"no place was free within {patience:.3g} s; send the request again later")
    if (error := turn.result()) is not None:
        raise error


def _draining() -> Draining:
    return Draining("the router is shutting down; try another one")
