"""What all endpoints share: the model's name and tokenizer, the fleet, and how much is going on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import ModelNotFound, NodeError
from pdserve.tls import PeerTls
from router.answer import Answerer
from router.chat.dialect import find_dialect
from router.fleet import Fleet
from router.gate.admission import Gate
from router.gate.key_file import KeyFile
from router.generation import Generation
from router.metrics import Metrics
from router.options import RouterOptions
from router.prompts import PromptEncoder
from router.structured.checker import GrammarChecker
from router.tokenizer import Tokenizer


class Service:
    """The router without HTTP."""

    def __init__(self, options: RouterOptions, model: str, tokenizer: Tokenizer) -> None:
        self.options = options
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = PromptEncoder(tokenizer, lambda: self.fleet.limits().max_model_len)
        self.grammars = GrammarChecker(tokenizer.to_json)
        template = tokenizer.chat_template.source if tokenizer.chat_template else ""
        dialect = find_dialect(template, options.tool_call_parser, options.reasoning_parser)
        self.answerer = Answerer(tokenizer, dialect, model)
        tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
        self.metrics = Metrics()
        self.fleet = Fleet(model, options.prefill, options.decode, options.policy, self.metrics, tls)
        self.fleet.on_change(self._count_nodes)
        self.gate = Gate(options.max_inflight, options.max_queue, self.metrics)
        self.keys = None if options.api_keys is None else KeyFile(options.api_keys)
        self._watch: asyncio.Task[None] | None = None  # of the file of keys
        self._generations: set[Generation] = set()

    def start(self) -> None:
        """Begin to look after nodes and keys; needs the event loop."""
        self.fleet.start()
        if self.keys is not None:
            self.keys.on_reload = lambda success: self.metrics.key_reloads.labels("ok" if success else "failed").inc()
            self._watch = asyncio.create_task(self.keys.watch(), name="API keys")

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.encoder.close()
        await self.grammars.close()
        await self.fleet.close()

    def abort(self) -> None:
        """End everything that runs with an error."""
        for generation in list(self._generations):
            generation.fail(NodeError("the router is shutting down; send the request again"))

    def check_model(self, name: str | None) -> None:
        """A request may leave the name out; a wrong one is ModelNotFound."""
        if name is not None and name != self.model:
            raise ModelNotFound(f"model {name!r} is not served here; use {self.model!r}", "model", "model_not_found")

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
