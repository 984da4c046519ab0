"""The HTTP application: routes, the small endpoints, and errors in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import Draining, Overloaded, PdserveError
from router.completions_api.request_bodies import parse_chat, parse_completion
from router.dashboard.routes import PAGE, add_dashboard
from router.errors import ClientDisconnected, ErrorInfo, ResponseNotStored, encode_error
from router.fleet.policy import no_decode_node
from router.http.authentication import Authentication
from router.http.error_responses import SERVER_ERROR, http_error, send_error
from router.http.generate_endpoint import GenerateEndpoint
from router.http.openapi.document import openapi_document
from router.http.token_endpoints import add_token_routes, json_response
from router.responses_api.request import parse_items
from router.served_model import ServedModel
from router.service import Service

VERSION = version("pdserve")


class Shortcut:
    """Sends what generates to its endpoints past the layers of FastAPI, each of which costs a call per chunk.

    FastAPI knows these routes, too, to refuse other methods.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except Exception:
            with suppress(RuntimeError):  # the response has begun; uvicorn closes the connection then
                await send_error(send, SERVER_ERROR)
            raise  # for the log


def create_app(service: Service) -> ASGIApp:
    """Starting and stopping the application starts and stops the fleet."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(title="pdserve", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    endpoints = {
        "/v1/completions": GenerateEndpoint(service, "completions", parse_completion),
        "/v1/chat/completions": GenerateEndpoint(service, "chat", parse_chat),
        "/v1/responses": GenerateEndpoint(service, "responses", parse_items),
    }
    app.router.routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    _add_stored_responses(app)
    _add_models(app, service)
    add_token_routes(app, service)
    _add_operations(app, service)
    if service.observer is not None:
        add_dashboard(app, service.observer)
    _add_error_handlers(app)
    whole = Shortcut(app, endpoints)
    if service.keys is None:
        return whole
    open_paths = {"/health", *PAGE} | (set() if service.options.protect_metrics else {"/metrics"})
    return Authentication(whole, service.keys.client_of, open_paths, on_unauthorized=service.metrics.unauthorized.inc)


def _add_stored_responses(app: FastAPI) -> None:
    @app.post("/v1/responses/{name}/cancel")
    @app.get("/v1/responses/{name}/input_items")
    @app.api_route("/v1/responses/{name}", methods=["GET", "DELETE"])
    async def stored_response(name: str) -> Response:
        raise ResponseNotStored(f"response {name!r} is not here: responses are not stored", "response_id")


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def describe(model: ServedModel) -> dict[str, Any]:
        try:
            max_model_len = model.fleet.limits().max_model_len
        except Overloaded:  # the list is there while the nodes are not
            max_model_len = None
        card = {"id": model.name, "object": "model", "created": created, "owned_by": "pdserve"}
        return {**card, "root": model.root, "max_model_len": max_model_len}

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [describe(model) for model in service.models.values()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(describe(service.find(name)))


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        if service.draining:
            raise Draining("the router is about to end; go to another one")
        if not service.nodes.ready:
            raise no_decode_node(next(iter(service.models.values())).fleet.snapshot())
        return json_response({"status": "ok"})

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": VERSION})

    document = openapi_document(VERSION)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.export(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_error_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, PdserveError)
        error = http_error(exc)
        headers = {name.decode(): value.decode() for name, value in error.headers}
        return Response(error.body, error.status, headers)

    async def on_client_gone(request: Request, exc: Exception) -> Response:
        return Response(status_code=499)  # for logs; nobody reads it

    async def on_http_exception(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        messages = {
            404: f"there is nothing at {request.url.path}; the endpoints are under /v1",
            405: f"{request.method} is not allowed at {request.url.path}; use another method",
        }
        message = messages.get(exc.status_code, str(exc.detail))
        body = encode_error(ErrorInfo(message, "invalid_request_error"))
        return Response(body, exc.status_code, dict(exc.headers or {}), "application/json")

    async def on_fault(request: Request, exc: Exception) -> Response:
        return Response(SERVER_ERROR.body, SERVER_ERROR.status, media_type="application/json")

    app.add_exception_handler(PdserveError, on_error)
    app.add_exception_handler(ClientDisconnected, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_fault)
