"""The HTTP application: routes, authentication and error handlers."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import PdserveError, cut
from router.chat_page import PAGE as CHAT_PAGE
from router.completions_api.chat_dialect import ChatDialect
from router.completions_api.completions_dialect import CompletionsDialect
from router.dashboard.routes import PAGE, add_dashboard
from router.dialect.dialect import GenerateDialect
from router.dialect.node_headers import DECODE_NODE, PREFILL_NODE
from router.dialect.operation import Operation
from router.errors import ClientDisconnected
from router.gate.keys import fairness_key
from router.http.authentication import Authentication, KeyCheck, address_of, client_of
from router.http.docs_page import DOCS_PATH, docs_page
from router.http.endpoints.adapter_endpoints import add_adapter_routes
from router.http.endpoints.body_reader import BodyReader
from router.http.endpoints.generate_endpoint import GenerateEndpoint
from router.http.endpoints.pooling_endpoint import PoolingEndpoint
from router.http.endpoints.responses_socket import ResponsesSocket
from router.http.endpoints.server_info import add_server_routes
from router.http.endpoints.small_endpoints import VERSION, add_info_routes, add_token_routes
from router.http.endpoints.stored_responses import add_stored_responses
from router.http.error_responses import ErrorFormats, error_response, http_error, server_error
from router.http.incoming_bodies import receive_decoded, refused_body
from router.http.openapi import all_operations, check_documented, openapi_document
from router.http.request_ids import send_with_id
from router.messages_api.dialect import MessagesDialect
from router.page_files import add_page
from router.pooling.dialects import EmbeddingsDialect, PoolingDialect, RerankDialect, ScoreDialect
from router.responses_api.background import RunningResponses
from router.responses_api.dialect import CompactDialect, ResponsesDialect
from router.responses_api.response_database import StoreLimits
from router.responses_api.response_store import ResponseStore
from router.service import Service
from router.text.fair_slots import CLIENT


class DirectRoutes:
    """ASGI middleware that calls the endpoints of models directly: each layer of FastAPI costs a call per chunk.

    It also sets CLIENT, decompresses bodies and answers HEAD like GET.

    FastAPI has the same routes, to reject other methods.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, ASGIApp],
        sockets: Mapping[str, ASGIApp],
        formats: ErrorFormats,
        max_body_bytes: int,
    ) -> None:
        """``sockets``: applications of WebSockets; other paths have none."""
        self._max_body_bytes = max_body_bytes
        self._app = app
        self._endpoints = endpoints
        self._sockets = sockets
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CLIENT.set(fairness_key(client_of(scope), address_of(scope)))
        if scope["type"] == "websocket":
            await self._sockets.get(scope["path"], self._app)(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        errors = self._formats.of(scope["path"])
        if scope["method"] == "HEAD":  # uvicorn drops the body
            scope = {**scope, "method": "GET"}
        if (refusal := refused_body(scope, self._max_body_bytes, errors)) is not None:
            await refusal(scope, receive, send)
            return
        receive = receive_decoded(scope, receive)
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send_with_id(scope, send, errors))
            return
        try:
            await endpoint(scope, receive, send)
        except Exception:
            with suppress(RuntimeError):  # the response has begun; uvicorn closes the connection
                await server_error(errors)(scope, receive, send_with_id(scope, send, errors))
            raise  # uvicorn logs it


def create_app(service: Service) -> ASGIApp:
    """Build the application. Its lifespan starts and stops the service. Raises ConfigError."""
    store = _open_store(service)
    running: RunningResponses = {}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if store is not None:
            store.start()
        yield
        await service.close()
        if store is not None:
            await store.close()

    app = FastAPI(title="pdserve", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a redirect would use the scheme and host that a proxy has sent
    bodies = BodyReader(service.options.max_body_bytes, service.longest_context, service.metrics)
    responses = ResponsesDialect(store, running)
    generating: list[GenerateDialect[Any]] = [
        CompletionsDialect(),
        ChatDialect(),
        responses,
        CompactDialect(store),
        MessagesDialect(),
    ]
    pooling: list[PoolingDialect[Any]] = [EmbeddingsDialect(), ScoreDialect(), RerankDialect()]
    endpoints = _endpoints(service, bodies, generating, pooling)
    formats = ErrorFormats(generating)
    app.router.routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    add_stored_responses(app, store, running, service.options.sse_keep_alive)
    add_info_routes(app, service)
    add_token_routes(app, service, bodies)
    add_server_routes(app, service)
    add_adapter_routes(app, service, bodies)
    _add_documents(app, all_operations([*generating, *pooling]))
    if service.dashboard is not None:
        add_dashboard(app, service.dashboard)
    if service.options.chat_page:
        add_page(app, CHAT_PAGE)
    _add_error_handlers(app, formats)
    key_check = None if service.keys is None else KeyCheck(service.keys, service.metrics)
    sockets = {"/v1/responses": ResponsesSocket(service, bodies, responses, key_check=key_check)}
    direct = DirectRoutes(app, endpoints, sockets, formats=formats, max_body_bytes=service.options.max_body_bytes)
    return _guarded(direct, service, key_check, formats)


def _endpoints(
    service: Service,
    bodies: BodyReader,
    generating: Sequence[GenerateDialect[Any]],
    pooling: Sequence[PoolingDialect[Any]],
) -> dict[str, ASGIApp]:
    """Return the endpoints of all dialects by path."""
    endpoints: dict[str, ASGIApp] = {}
    for dialect in generating:
        endpoints |= dict.fromkeys(dialect.paths, GenerateEndpoint(service, bodies, dialect))
    for pooling_dialect in pooling:
        endpoints |= dict.fromkeys(pooling_dialect.paths, PoolingEndpoint(service, bodies, pooling_dialect))
    return endpoints


def _guarded(whole: ASGIApp, service: Service, key_check: KeyCheck | None, formats: ErrorFormats) -> ASGIApp:
    """Return the application behind the check of API keys and the rules for other origins, where there are any."""
    if key_check is not None:
        public = {"/health", "/health/live", "/ping", DOCS_PATH, *PAGE, *CHAT_PAGE}
        whole = Authentication(whole, key_check, public, formats=formats)
    if service.options.cors_origins:  # outside: a preflight request has no key
        whole = CORSMiddleware(
            whole,
            allow_origins=service.options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", PREFILL_NODE, DECODE_NODE],
        )
    return whole


def _add_documents(app: FastAPI, operations: Sequence[Operation]) -> None:
    """Add the OpenAPI document, which has all routes so far, and its page.

    Each is made at its first request: both took a twentieth of a router's start.
    """
    check_documented(operations, app.routes)
    document = cache(lambda: openapi_document(VERSION, operations))
    page = cache(lambda: docs_page(document()))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    @app.get(DOCS_PATH)
    async def docs() -> Response:
        return page()


def _open_store(service: Service) -> ResponseStore | None:
    options = service.options
    if options.response_store is None:
        return None
    limits = StoreLimits(options.response_store_size, options.response_store_seconds, options.max_body_bytes)
    path = ":memory:" if options.response_store == "memory" else options.response_store.removeprefix("sqlite:")
    return ResponseStore(path, limits, service.metrics)


def _hint_of_path(path: str, app: FastAPI) -> str:
    """Return the nearest path of an endpoint, or the page that lists all."""
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.8)
    return f"did you mean {nearest[0]}?" if nearest else f"{DOCS_PATH} lists the endpoints"


def _without_slash(request: Request, app: FastAPI) -> str:
    """Return a relative reference to a path without its last slash; empty if there is no such path.

    Scheme, host and a prefix that a proxy has removed stay those of the client.
    """
    path = request.url.path
    query = request.url.query
    if not path.endswith("/") or not _methods_of_path(path.rstrip("/"), app):
        return ""
    return f"../{path.rstrip('/').rpartition('/')[2]}" + (f"?{query}" if query else "")


def _methods_of_path(path: str, app: FastAPI) -> list[str]:
    matching = [route for route in app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    routes = [route for route in matching if route.path == path] or matching  # one path also matches another's {id}
    return sorted({method for route in routes for method in route.methods or ()})


def _add_error_handlers(app: FastAPI, formats: ErrorFormats) -> None:
    @app.exception_handler(PdserveError)
    async def on_error(request: Request, exc: PdserveError) -> Response:
        return error_response(exc, formats.of(request.url.path))

    @app.exception_handler(ClientDisconnected)
    async def on_client_disconnected(request: Request, exc: Exception) -> Response:
        return Response(status_code=499)  # never sent

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, exc: HTTPException) -> Response:
        path = cut(request.url.path)
        if exc.status_code == 404 and (location := _without_slash(request, app)):
            return Response(status_code=307, headers={"location": location})
        methods = _methods_of_path(request.url.path, app)
        messages = {
            404: f"unknown path {path}; {_hint_of_path(path, app)}",
            405: f"{request.method} is not allowed at {path}; use {' or '.join(methods)}",
        }
        message = messages.get(exc.status_code, str(exc.detail))
        response = http_error(exc.status_code, message, formats.of(request.url.path))
        response.headers.update(exc.headers or {})
        if exc.status_code == 405:  # Starlette names only the methods of the first route
            response.headers["allow"] = ", ".join(methods)
        return response

    @app.exception_handler(Exception)
    async def on_exception(request: Request, exc: Exception) -> Response:
        return server_error(formats.of(request.url.path))
