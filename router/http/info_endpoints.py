"""/v1/models, /health, /version and /metrics."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pdserve.errors import Draining, Overloaded
from router.fleet.policy import no_decode_node
from router.served_model import ServedModel
from router.service import Service

VERSION = version("pdserve")


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class HealthStatus(msgspec.Struct):
    status: Literal["ok"]


class VersionInfo(msgspec.Struct):
    version: str


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def add_info_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def card(model: ServedModel) -> ModelCard:
        try:
            max_model_len = model.fleet.limits().max_model_len
        except Overloaded:  # models are listed without ready nodes, too
            max_model_len = None
        return ModelCard(model.name, "model", created, "pdserve", model.root, max_model_len)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList("list", [card(model) for model in service.models.values()]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(service.find(name)))

    @app.get("/health")
    async def health() -> Response:
        if service.draining:
            raise Draining("the router is draining; use another router")
        if not service.nodes.ready:
            raise no_decode_node(next(iter(service.models.values())).fleet.snapshot())
        return json_response(HealthStatus("ok"))

    @app.get("/version")
    async def show_version() -> Response:
        return json_response(VersionInfo(VERSION))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.export(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
