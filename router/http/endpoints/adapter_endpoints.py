"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form, for administrators alone."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from pdserve.errors import ModelNotFound, Overloaded, RequestError, shown
from router.completions_api.body_parsing import convert, parse_json
from router.errors import EndpointDisabled
from router.fleet.adapter_orders import load_on_all, unload_on_all
from router.fleet.node_client import NodeClient
from router.http.authentication import client_of
from router.http.endpoints.body_reader import BodyReader
from router.service import ServedModel, Service


class LoadAdapterBody(msgspec.Struct, kw_only=True, frozen=True):
    lora_name: str
    lora_path: str  # on the nodes' hosts, below their --allow-weight-changes
    load_inplace: bool = False  # the name may be in use: new requests get the new adapter
    model: str | None = None  # the base; needed if there are several


class UnloadAdapterBody(msgspec.Struct, kw_only=True, frozen=True):
    lora_name: str
    model: str | None = None


def add_adapter_routes(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        _check_admin(request)
        body = await bodies.read(request.receive, lambda data: convert(parse_json(data), LoadAdapterBody))
        base = _base(service, body.model)
        if body.lora_name in service.names:
            raise RequestError(f"{shown(body.lora_name)} is the name of a model; choose another one", "lora_name")
        if body.lora_name in base.fleet.adapters and not body.load_inplace:
            raise RequestError(
                f"adapter {shown(body.lora_name)} is loaded already; unload it, or set load_inplace", "lora_name"
            )
        await load_on_all(_nodes(service, base), body.lora_name, body.lora_path, body.load_inplace)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        _check_admin(request)
        body = await bodies.read(request.receive, lambda data: convert(parse_json(data), UnloadAdapterBody))
        base = _base(service, body.model)
        if body.lora_name not in base.fleet.adapters:
            raise ModelNotFound(
                f"adapter {shown(body.lora_name)} is not loaded; /v1/models lists the others", "lora_name"
            )
        await unload_on_all(_nodes(service, base), body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


def _check_admin(request: Request) -> None:
    """Raise EndpointDisabled unless the client's key is an administrator's."""
    if not client_of(request.scope).admin:
        raise EndpointDisabled(
            "adapters are changed by administrators: set `admin = true` for a key in the file of --api-keys, or use "
            "`pdserve lora`"
        )


def _base(service: Service, name: str | None) -> ServedModel:
    model = service.find(name)
    if model.adapter:
        raise RequestError(f"{shown(name)} is an adapter; name its base {model.base!r}", "model")
    return model


def _nodes(service: Service, base: ServedModel) -> list[NodeClient]:
    """Return the ready nodes of a model. Raises Overloaded without any."""
    described = [node for node in service.nodes.known().values() if node.description is not None]
    nodes = [node for node in described if node.description is not None and node.description.model == base.name]
    if not nodes or not all(node.ready for node in nodes):
        raise Overloaded(f"not all nodes of model {base.name!r} are ready; try again when they are")
    return nodes
