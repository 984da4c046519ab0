"""The state that all endpoints share: models, nodes, admission, keys and metrics."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import grpc

from pdserve.adapters.adapter import NO_ADAPTER, NamedAdapter
from pdserve.checkpoint.hub import resolve_model
from pdserve.errors import ModelNotFound, NodeError, Overloaded, PdserveError, PeerError, RequestError, shown
from pdserve.metrics import exposition
from pdserve.model.generation_defaults import GenerationDefaults, load_generation_defaults
from pdserve.rpc.tls import PeerTls
from pdserve.tracing.spans import NO_TRACER, Tracer
from router.dashboard.dashboard_state import DashboardState
from router.fleet.fleet import Fleet
from router.fleet.nodes import Nodes
from router.fleet.policy import BOTH
from router.fleet.stream_mover import StreamMover
from router.freed_memory import MemoryTrimmer
from router.gate.admission import AdmissionController
from router.gate.keys import KeyFile, KeyRing, single_key
from router.images.fetchers import Fetchers
from router.images.loading import ImageLoader
from router.loop_lag import LoopLag
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.text.chat.parsers import select_parsers
from router.text.prompt_encoder import PromptEncoder
from router.text.structured.grammar_checker import GrammarChecker
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0  # seconds for the home node to answer a scrape


class Running(Protocol):
    """A request at the nodes."""

    def fail(self, error: PdserveError) -> None: ...


class ServedModel:
    """A model: tokenizer, chat template, output parsers, nodes. ``root``: directory or hub id of the tokenizer."""

    def __init__(
        self, name: str, root: str, tokenizer: Tokenizer, fleet: Fleet, options: RouterOptions, *, images: ImageLoader
    ) -> None:
        self.name = name
        self.base = name  # name of the model whose nodes compute the answers
        self.adapter = NO_ADAPTER  # digest; the nodes' weights are changed by this adapter
        self.root = root
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.images = images
        self.options = options
        trusted = options.trust_request_chat_template
        self.mover = StreamMover(fleet)
        self.encoder = PromptEncoder(tokenizer, lambda: fleet.limits().max_model_len, trusted)
        self.grammars = GrammarChecker(tokenizer.to_json)
        template = tokenizer.chat_template.source if tokenizer.chat_template else ""
        self.parsers = select_parsers(template, options.tool_call_parser, options.reasoning_parser)
        self.defaults = GenerationDefaults()
        if options.generation_config == "auto":
            self.defaults = load_generation_defaults(Path(resolve_model(root)))
            logger.info("%s: defaults of generation_config.json: %s", name, self.defaults)

    def with_adapter(self, adapter: NamedAdapter) -> ServedModel:
        """Return the model that an adapter makes of this one. It shares all else, and is not closed."""
        model = copy.copy(self)
        model.name = adapter.name
        model.root = adapter.root
        model.adapter = adapter.digest
        return model

    async def close(self) -> None:
        self.mover.close()
        await self.encoder.close()
        await self.grammars.close()


class Service:
    """The router without HTTP."""

    def __init__(
        self, options: RouterOptions, tokenizers: Mapping[str, tuple[str, Tokenizer]], tracer: Tracer = NO_TRACER
    ) -> None:
        """``tokenizers``: source and tokenizer by model name. Raises ConfigError."""
        self.options = options
        self.tracer = tracer
        self.metrics = RouterMetrics(options.metrics_client_names)
        tls = None if options.grpc_tls is None else PeerTls(options.grpc_tls)
        sources = {"prefill": options.prefill, "decode": options.decode, BOTH: options.node}
        self.nodes = Nodes(sources, tokenizers.keys(), tls, options.home_node)
        self.nodes.on_change(self._count_nodes)
        self.metrics.show_index_rebuilds(lambda: self.nodes.prefixes.rebuilds)
        self._counted = {(role, name) for role, listed in sources.items() if listed for name in tokenizers}
        fetchers = Fetchers() if options.allow_image_urls else None
        self.images = ImageLoader(options.image_memory, self.metrics, fetchers=fetchers)
        self.models: dict[str, ServedModel] = {}
        for name, (root, tokenizer) in tokenizers.items():
            self.metrics.of(name)  # creates the series, which begin at 0
            fleet = Fleet(name, self.nodes, options.policy, metrics=self.metrics)
            self.models[name] = ServedModel(name, root, tokenizer, fleet=fleet, options=options, images=self.images)
        self.names = self.models | {name: next(iter(self.models.values())) for name in options.aliases}
        self.admission = AdmissionController(options.max_inflight, options.max_queue, self.metrics)
        self.keys: KeyFile | KeyRing | None = None
        if options.api_keys is not None:
            self.keys = KeyFile(options.api_keys)
        elif options.api_key is not None:
            self.keys = single_key(options.api_key)
        self.draining = False  # /health fails
        self.dashboard = DashboardState(self.metrics, self.nodes, tokenizers.keys()) if options.dashboard else None
        self.turns = asyncio.Lock()  # held while a large response encodes its next piece
        self._loop_lag = LoopLag(self.metrics.loop_lag)
        self._memory = MemoryTrimmer()
        self._key_watch: asyncio.Task[None] | None = None
        self._running: set[Running] = set()

    def start(self) -> None:
        self._loop_lag.start()
        self._memory.start()
        self.nodes.start()
        for model in self.models.values():
            model.mover.start()
        if self.dashboard is not None:
            self.dashboard.start()
        if isinstance(self.keys, KeyFile):
            self._key_watch = asyncio.create_task(self.keys.watch(self._count_key_reload), name="API keys")

    async def close(self) -> None:
        self._loop_lag.close()
        self._memory.close()
        if self._key_watch is not None:
            self._key_watch.cancel()
        if self.dashboard is not None:
            self.dashboard.close()
        for model in self.models.values():
            await model.close()
        await self.images.close()
        await self.nodes.close()
        self.tracer.close()

    async def home_metrics(self) -> bytes:
        """Return the metrics of the node that this router runs beside, in Prometheus' format; empty if it has none."""
        if (home := self.nodes.home) is None:
            return b""
        with suppress(grpc.aio.AioRpcError, PeerError):
            status = await home.status(_STATUS_SECONDS)
            return exposition(status.counters).encode()
        return b""

    def abort(self) -> None:
        """End all running and waiting requests with an error."""
        self.admission.abort()
        for request in list(self._running):
            request.fail(NodeError("the router is shutting down; send the request again"))

    def find(self, name: str | None) -> ServedModel:
        """The model with this name; None names the only one. Raises RequestError or ModelNotFound."""
        served = " or ".join(map(repr, self.names))
        if name is None:
            if len(self.models) > 1:
                raise RequestError(f"the request names no model; use {served}", "model")
            return next(iter(self.models.values()))
        if name in self.names:
            return self.names[name]
        for model in self.models.values():
            if (adapter := model.fleet.adapters.get(name)) is not None:
                return model.with_adapter(adapter)
        raise ModelNotFound(f"model {shown(name)} is not served here; use {served}", "model", "model_not_found")

    @property
    def adapted(self) -> list[ServedModel]:
        """The models that adapters make, by name. A model's name hides an adapter of the same name."""
        adapted = {
            name: model.with_adapter(adapter)
            for model in self.models.values()
            for name, adapter in model.fleet.adapters.items()
            if name not in self.names
        }
        return [adapted[name] for name in sorted(adapted)]

    def longest_context(self) -> int:
        """Largest ``max_model_len`` of any model; 0 while no model has a ready node."""
        longest = 0
        for model in self.models.values():
            with suppress(Overloaded):
                longest = max(longest, model.fleet.limits().max_model_len)
        return longest

    @contextmanager
    def running(self, request: Running) -> Iterator[None]:
        self._running.add(request)
        try:
            yield
        finally:
            self._running.discard(request)

    def _count_nodes(self) -> None:
        ready = Counter((view.role, view.model) for view in self.nodes.views() if view.ready)
        self._counted |= ready.keys()
        for role, model in self._counted:
            self.metrics.nodes_ready.labels(role, model).set(ready[role, model])

    def _count_key_reload(self, success: bool) -> None:
        self.metrics.key_reloads.labels("ok" if success else "failed").inc()
