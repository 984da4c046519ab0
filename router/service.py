"""What all endpoints share: the model's name and tokenizer, the fleet, and how much is going on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import ModelNotFound, NodeError, Overloaded
from router.fleet import Fleet
from router.generation import Generation
from router.metrics import Metrics
from router.options import RouterOptions
from router.prompts import PromptEncoder
from router.tokenizer import Tokenizer


class Service:
    """The router without HTTP."""

    def __init__(self, options: RouterOptions, model: str, tokenizer: Tokenizer) -> None:
        self.options = options
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer)
        self.fleet = Fleet(model, options.prefill, options.decode)
        self.metrics = Metrics()
        self.fleet.on_change(self._count_nodes)
        self._in_flight = 0
        self._idle = asyncio.Event()
        self.draining = False
        self._generations: set[Generation] = set()

    async def close(self) -> None:
        self.encoder.close()
        await self.fleet.close()

    def drain(self) -> None:
        """Refuse what comes from now on; what runs goes on until ``abort``."""
        self.draining = True

    async def idle(self) -> None:
        """Returns once no request is under way; for use after ``drain``."""
        if self._in_flight:
            await self._idle.wait()

    def abort(self) -> None:
        """End everything that runs with an error."""
        for generation in list(self._generations):
            generation.fail(NodeError("the router is shutting down; send the request again"))

    def check_model(self, name: str | None) -> None:
        """A request may leave the name out; a wrong one is ModelNotFound."""
        if name is not None and name != self.model:
            raise ModelNotFound(f"model {name!r} is not served here; use {self.model!r}", "model", "model_not_found")

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Room for one request. Raises Overloaded when there is none."""
        limit = self.options.max_inflight
        if self.draining:
            raise Overloaded("the router is shutting down; try another one")
        if self._in_flight >= limit:
            raise Overloaded(f"{self._in_flight} requests are under way, the limit is {limit}; try again shortly")
        self._idle.clear()
        self._in_flight += 1
        self.metrics.in_flight.inc()
        try:
            yield
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.dec()
            if not self._in_flight:
                self._idle.set()

    @contextmanager
    def running(self, generation: Generation) -> Iterator[None]:
        self._generations.add(generation)
        try:
            yield
        finally:
            self._generations.discard(generation)

    def _count_nodes(self) -> None:
        for role in ("prefill", "decode"):
            ready = sum(node.ready for node in self.fleet.nodes if node.role == role)
            self.metrics.nodes_ready.labels(role).set(ready)
