"""The router process: a listening socket, uvicorn on uvloop, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from pdserve.checkpoint.files import read_text
from pdserve.checkpoint.hub import resolve_model
from pdserve.errors import CheckpointError, ConfigError
from pdserve.host.process import StatusWriter
from pdserve.http.connections import BoundedConnection, ConnectionLimit, listen, raise_file_limit
from pdserve.http.metrics_server import MetricsServer
from pdserve.logs import set_process_fields
from pdserve.rpc.address import join_address
from pdserve.rpc.tls import load_chain
from pdserve.tracing.trace_flags import make_tracer
from router.file_reload import FileReloader
from router.http.app import create_app
from router.http.endpoints.body_reader import BODIES_IN_MEMORY
from router.https_server import HttpsServer
from router.options import RouterOptions
from router.service import Service
from router.text.chat.template import MAX_SOURCE
from router.text.chat.template_renderer import check_template
from router.text.tokenizer import Tokenizer
from router.websocket_connections import MessageMemory, WebSocketConnection

_log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000  # allocations between garbage collections; requests leave no cycles
_GRACEFUL_SECONDS = 1  # seconds that uvicorn waits for connections to flush
_MAX_CONNECTIONS = 16_384  # at most, unless --max-connections is given
_NODE_PATIENCE = 3.0  # seconds without a node until a log line describes the missing ones
_WARNING_INTERVAL = 60.0  # seconds until the next such line
_READY_GRACE = 5.0  # seconds to wait for nodes that do not answer, and for connections between nodes


def serve(options: RouterOptions, status: StatusWriter) -> None:
    """Serve until a signal, then drain. Raises ConfigError or CapacityError on a failed start."""
    certificate = None
    if options.tls_cert is not None and options.tls_key is not None:
        certificate = Certificate(options.tls_cert, options.tls_key)
    max_connections = _max_connections(options)
    listener = listen(options.host, options.port, "--port")
    metrics_server = None
    if options.metrics_port is not None:
        metrics_server = MetricsServer(options.metrics_host, options.metrics_port)
    status.listening(join_address(*listener.getsockname()[:2]))
    name = join_address(socket.gethostname(), listener.getsockname()[1])
    set_process_fields(node=name)
    status.loading("tokenizer", -1)
    tokenizers = {name: (root, load_tokenizer(root, options.chat_template)) for name, root in options.models}
    service = Service(options, tokenizers, make_tracer(options.traces, "router", name, options.trace_sample))
    config = _uvicorn_config(options, service, max_connections)
    config.load()
    gc.freeze()  # long-lived objects
    gc.set_threshold(_GC_THRESHOLD)
    scheme = "http" if certificate is None else "https"
    _log.info("listening on %s://%s", scheme, join_address(*listener.getsockname()[:2]))
    server = _Server(config, service, status, certificate, metrics_server)
    server.run(sockets=[listener])


def _uvicorn_config(options: RouterOptions, service: Service, max_connections: int) -> uvicorn.Config:
    metrics = service.metrics
    limit = ConnectionLimit(max_connections, metrics.evicted_connections.inc, metrics.refused_connections.inc)
    metrics.connections.set_function(lambda: limit.num_open)
    return uvicorn.Config(
        create_app(service),
        loop="uvloop",
        http=partial(  # type: ignore[arg-type]
            BoundedConnection,
            limit=limit,
            stall_timeout=options.client_stall_timeout,
            on_stall=metrics.stalled_clients.inc,
        ),
        ws=partial(  # type: ignore[arg-type]
            WebSocketConnection,
            limit=limit,
            memory=MessageMemory(BODIES_IN_MEMORY * options.max_body_bytes),
            stall_timeout=options.client_stall_timeout,
            on_stall=metrics.stalled_clients.inc,
        ),
        ws_max_size=options.max_body_bytes,
        ws_per_message_deflate=False,
        ws_ping_timeout=None,  # while a client's next message waits, its pong is not read
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=options.keep_alive_timeout,
        proxy_headers=False,  # proxy headers would let a client pose as any address
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        backlog=2048,
    )


def load_tokenizer(root: str, template_file: str | None = None) -> Tokenizer:
    """Load a model's tokenizer and compile its chat template, or that of a file. Raises CheckpointError."""
    template = None if template_file is None else read_text(Path(template_file), MAX_SOURCE)
    tokenizer = Tokenizer.load(resolve_model(root), template)
    if tokenizer.chat_template is not None:
        try:
            check_template(tokenizer.chat_template)
        except CheckpointError as exc:
            raise CheckpointError(f"{template_file or root}: {exc}") from exc
    return tokenizer


def _max_connections(options: RouterOptions) -> int:
    """Return the limit of connections: a quarter of the files is left to nodes and others. Raises ConfigError."""
    files = raise_file_limit()
    allowed = files - files // 4
    if options.max_connections is None:
        return min(allowed, _MAX_CONNECTIONS)
    if options.max_connections > allowed:
        text = f"--max-connections {options.max_connections} exceeds three quarters of the limit of open files, {files}"
        raise ConfigError(f"{text}; raise that with ulimit -n, or use at most {allowed}")
    return options.max_connections


class _Server(uvicorn.Server):
    """uvicorn with draining:

    SIGTERM ──► /health fails ──--drain-grace──► no new requests ──all have ended, or --drain-timeout──► exit 0
                                                    SIGINT or a second signal: at once ─┘
                                                    (running requests end with an error)
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        status: StatusWriter,
        certificate: Certificate | None,
        metrics_server: MetricsServer | None,
    ) -> None:
        super().__init__(config)
        self._metrics_server = metrics_server
        self._service = service
        self._status = status
        self._certificate = certificate
        self._background: list[asyncio.Task[None]] = []
        self._stop_now = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificate is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            context = self._certificate.context
            servers: list[Any] = [HttpsServer(listener, context, self._make_connection) for listener in sockets or ()]
            self.servers = servers
        if self._metrics_server is not None:
            await self._metrics_server.start(self._service.metrics.registry)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._metrics_server is not None:
            self._metrics_server.close()

    def _make_connection(self) -> BoundedConnection:
        make: Any = self.config.http_protocol_class
        connection: BoundedConnection = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's handlers, which raise the signal again after serving."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._background.append(asyncio.create_task(self._report_ready()))
        if self._certificate is not None:
            self._background.append(asyncio.create_task(self._certificate.watch()))
        try:
            yield
        finally:
            for task in self._background:
                task.cancel()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT or self._service.draining:
            self._stop_now.set()
        if not self._service.draining:
            self._service.draining = True
            self._background.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        options = self._service.options
        self._close_after_response()
        tasks = [asyncio.create_task(self._wait_empty()), asyncio.create_task(self._stop_now.wait())]
        await asyncio.wait(
            tasks, timeout=options.drain_grace + options.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for task in tasks:
            task.cancel()
        self._service.abort()
        self.should_exit = True

    async def _wait_empty(self) -> None:
        """Wait out --drain-grace, reject new requests, return when none is left."""
        await asyncio.sleep(self._service.options.drain_grace)
        self._stop_accepting()
        await self._service.admission.wait_empty()

    def _close_after_response(self) -> None:
        """Close each connection after its response, so the client's next request goes to another router."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers.append((b"connection", b"close"))  # uvicorn's copy

    def _stop_accepting(self) -> None:
        """Reject new requests and connections, and close idle connections."""
        self._service.admission.close()
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, BoundedConnection):  # WebSockets close after the last response
                connection.shutdown()

    async def _report_ready(self) -> None:
        """Report readiness once all nodes are, or a grace period after the last one that loads."""
        nodes = self._service.nodes
        self._status.loading("nodes", -1)
        await self._wait_for_nodes()
        late = False
        while not (nodes.complete or late):
            late = not nodes.starting
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READY_GRACE):
                    await nodes.wait_until(lambda: nodes.complete)
        self._status.ready()

    async def _wait_for_nodes(self) -> None:
        """Return once a node takes requests. Until then, log now and then what each node lacks."""
        nodes = self._service.nodes
        patience = _NODE_PATIENCE
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await nodes.wait_until(lambda: nodes.ready)
                return
            patience = _WARNING_INTERVAL
            silent, loading = nodes.not_ready()
            level = logging.WARNING if silent or not loading else logging.INFO
            missing = "; ".join([*silent, *loading]) or "none is listed; check --prefill, --decode and --node"
            _log.log(level, "no node takes requests yet, clients get a 503: %s", missing)


class Certificate(FileReloader):
    """The files of ``--tls-cert`` and ``--tls-key``, reloaded on changes, and the SSL context that uses them."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError if the files cannot be used."""
        super().__init__([Path(cert), Path(key)])
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        load_chain(self.context, *self._paths)

    async def _load(self) -> None:
        """Try the files in a scratch context first: a failure may leave half a pair in the context."""
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._paths)
        load_chain(self.context, *self._paths)
