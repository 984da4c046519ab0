"""/load, /server_info and /tokenizer_info."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from pdserve.checkpoint.files import MAX_TOKENIZER_CONFIG, read_object
from pdserve.checkpoint.hub import resolve_model
from pdserve.model.generation_defaults import GenerationDefaults
from router.errors import EndpointDisabled
from router.http.endpoints.small_endpoints import VERSION, json_response
from router.service import ServedModel, Service

# Options that clients may see: no file paths, no addresses.
_OPTIONS = (
    "policy",
    "request_timeout",
    "migrations",
    "max_inflight",
    "max_queue",
    "max_body_bytes",
    "client_stall_timeout",
    "sse_keep_alive",
    "generation_config",
    "tool_call_parser",
    "reasoning_parser",
)
_TOKENS = ("tokenizer_class", "bos_token", "eos_token", "unk_token", "pad_token")


class ServerLoad(msgspec.Struct):
    """``server_load``: requests to models that have not ended, also those that wait."""

    server_load: int


class ModelInfo(msgspec.Struct):
    """``ready_nodes`` by role; ``generation_defaults`` are those that differ from the API's."""

    names: list[str]
    ready_nodes: dict[str, int]
    generation_defaults: GenerationDefaults


class ServerInfo(msgspec.Struct):
    version: str
    options: dict[str, Any]
    models: list[ModelInfo]


class TokenizerInfoQuery(msgspec.Struct, frozen=True):
    model: str | None = None


class TokenizerInfo(msgspec.Struct):
    """The tokenizer's configuration under transformers' names, and the chat template in use."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    additional_special_tokens: list[str]
    chat_template: str | None


def add_server_routes(app: FastAPI, service: Service) -> None:
    """Raises CheckpointError for a tokenizer_config.json that cannot be read, if /tokenizer_info is on."""

    @app.get("/load")
    async def load() -> Response:
        return json_response(ServerLoad(service.admission.num_requests))

    @app.get("/server_info")
    async def server_info() -> Response:
        options = {name: getattr(service.options, name) for name in _OPTIONS}
        models = [_model_info(service, model) for model in service.models.values()]
        return json_response(ServerInfo(VERSION, options, models))

    enabled = service.options.enable_tokenizer_info_endpoint
    infos = {name: _tokenizer_info(model) for name, model in service.models.items()} if enabled else {}

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        if not enabled:
            raise EndpointDisabled("/tokenizer_info is off; start the router with --enable-tokenizer-info-endpoint")
        query = msgspec.convert(dict(request.query_params), TokenizerInfoQuery)
        return json_response(infos[service.find(query.model).base])


def _model_info(service: Service, model: ServedModel) -> ModelInfo:
    names = [name for name, other in service.names.items() if other is model]
    nodes = Counter(node.role for node in service.nodes.views() if node.ready and node.model == model.name)
    return ModelInfo(names, dict(nodes), model.defaults)


def _tokenizer_info(model: ServedModel) -> TokenizerInfo:
    path = Path(resolve_model(model.root)) / "tokenizer_config.json"
    config = read_object(path, MAX_TOKENIZER_CONFIG) if path.exists() else {}
    special = config.get("additional_special_tokens")
    tokens = special if isinstance(special, list) else []
    return TokenizerInfo(
        **{name: _token(config.get(name)) for name in _TOKENS},
        additional_special_tokens=[text for token in tokens if (text := _token(token))],
        chat_template=model.encoder.template or None,
    )


def _token(token: Any) -> str | None:
    """A token is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
