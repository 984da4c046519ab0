"""The OpenAPI document: each route with its request body, response object and statuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from router.completions_api.body_parsing import other_fields
from router.completions_api.request_bodies import ChatBody, CompletionBody
from router.dialect.dialect import Dialect
from router.dialect.operation import ANY, WITH_BODY, Operation
from router.http.endpoints.adapter_endpoints import LoadAdapterBody, UnloadAdapterBody
from router.http.endpoints.server_info import ServerInfo, ServerLoad, TokenizerInfo, TokenizerInfoQuery
from router.http.endpoints.small_endpoints import (
    DetokenizeBody,
    DetokenizeResponse,
    HealthStatus,
    ModelCard,
    ModelList,
    RenderedPrompt,
    TokenizeBody,
    TokenizeResponse,
    VersionInfo,
)
from router.http.endpoints.stored_responses import ItemsQuery, RetrieveQuery
from router.http.example_bodies import EXAMPLE_BODIES
from router.messages_api.errors import MessagesErrorResponse
from router.messages_api.request import EXTENSIONS, CountTokensRequest
from router.messages_api.response_objects import MessageTokensCount
from router.responses_api.output_objects import DeletedResponse, InputItemList, ResponseObject

Fields = dict[str, Any]

# One server-sent event; ``data`` is JSON or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_PARAMETER = re.compile(r"{[^}]*}")  # path parameter
_REF = "#/components/schemas/{name}"
_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The request has no API key, or an unknown one.",
    404: "The path, model or response does not exist.",
    413: "The body is too large.",
    429: "The client exceeds its own rate limit; retry after `Retry-After` seconds.",
    500: "The router failed; see its log. Or two engines have ended with this request (`request_crashes_engines`).",
    502: "A node failed during the request.",
    503: "The server is overloaded; retry after `Retry-After` seconds.",
    504: "The request exceeded its time limit.",
}
_STORED = (*ANY, 400, 404)

# Operations of routes that no dialect has.
_OTHERS = (
    Operation(
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a message's prompt",
        response=MessageTokensCount,
        statuses=(*WITH_BODY, 503),
        body=CountTokensRequest,
        chat_fields=EXTENSIONS,
        error=MessagesErrorResponse,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}",
        summary="Show a stored response",
        response=ResponseObject,
        statuses=_STORED,
        streams=True,
        query=RetrieveQuery,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        summary="Delete a stored response",
        response=DeletedResponse,
        statuses=_STORED,
    ),
    Operation(
        path="/v1/responses/{id}/cancel",
        summary="Cancel a background response",
        response=ResponseObject,
        statuses=_STORED,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}/input_items",
        summary="List the input of a stored response",
        response=InputItemList,
        statuses=_STORED,
        query=ItemsQuery,
    ),
    Operation(method="get", path="/v1/models", summary="List models", response=ModelList),
    Operation(method="get", path="/v1/models/{id}", summary="Show a model", response=ModelCard, statuses=(*ANY, 404)),
    Operation(
        path="/v1/load_lora_adapter",
        summary="Load a LoRA adapter on all nodes",
        response=None,
        statuses=(*WITH_BODY, 502, 503),
        body=LoadAdapterBody,
    ),
    Operation(
        path="/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter on all nodes",
        response=None,
        statuses=(*WITH_BODY, 502, 503),
        body=UnloadAdapterBody,
    ),
    Operation(
        path="/tokenize",
        summary="Tokenize a text or chat",
        response=TokenizeResponse,
        statuses=(*WITH_BODY, 503),
        body=TokenizeBody,
    ),
    Operation(
        path="/detokenize",
        summary="Detokenize token ids",
        response=DetokenizeResponse,
        statuses=(*WITH_BODY, 503),
        body=DetokenizeBody,
    ),
    Operation(
        path="/v1/completions/render",
        summary="Tokenize the prompts of a completion",
        response=RenderedPrompt,
        is_list=True,
        statuses=(*WITH_BODY, 503),
        body=CompletionBody,
    ),
    Operation(
        path="/v1/chat/completions/render",
        summary="Render and tokenize a chat",
        response=RenderedPrompt,
        statuses=(*WITH_BODY, 503),
        body=ChatBody,
    ),
    Operation(method="get", path="/health", summary="Check readiness", response=HealthStatus, statuses=(*ANY, 503)),
    Operation(method="get", path="/ping", summary="Check readiness", response=HealthStatus, statuses=(*ANY, 503)),
    Operation(
        method="get",
        path="/health/live",
        summary="Check that the router responds, with or without nodes",
        response=HealthStatus,
    ),
    Operation(method="get", path="/version", summary="Show the version", response=VersionInfo),
    Operation(method="get", path="/metrics", summary="Prometheus metrics", response=None),
    Operation(method="get", path="/load", summary="Count the requests in progress", response=ServerLoad),
    Operation(method="get", path="/server_info", summary="Show options, models and nodes", response=ServerInfo),
    Operation(
        method="get",
        path="/tokenizer_info",
        summary="Show the tokenizer's configuration",
        response=TokenizerInfo,
        statuses=(*ANY, 400, 404),
        query=TokenizerInfoQuery,
    ),
)


def all_operations(dialects: Iterable[Dialect[Any]]) -> list[Operation]:
    own = [msgspec.structs.replace(dialect.operation, path=path) for dialect in dialects for path in dialect.paths]
    return [*own, *_OTHERS]


def check_documented(operations: Sequence[Operation], routes: Sequence[BaseRoute]) -> None:
    """Assert that ``operations`` are all routes, and no more."""
    served = {
        (_PARAMETER.sub("{id}", route.path), method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(operation.path, operation.method) for operation in operations}
    assert served == documented, f"the OpenAPI document differs from the routes in {served ^ documented}"


def openapi_document(version: str, operations: Sequence[Operation]) -> bytes:
    bodies = tuple(dict.fromkeys(operation.body for operation in operations if operation.body is not None))
    responses = [operation.response for operation in operations if operation.response is not None]
    errors = {operation.error for operation in operations}
    _, components = msgspec.json.schema_components([*bodies, *errors, *responses], ref_template=_REF)
    schemas = {kind: components.pop(kind.__name__) for kind in bodies}
    chat = schemas[ChatBody]["properties"]
    for operation in operations:
        if operation.body is not None and operation.chat_fields:
            schema = schemas[operation.body]
            of_chats = {name: field for name, field in chat.items() if name in operation.chat_fields}
            schema["properties"] = of_chats | schema["properties"]
    paths: dict[str, Fields] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**components, **{kind.__name__: _body(schema) for kind, schema in schemas.items()}},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(document)


def _body(schema: Fields) -> Fields:
    """A body's schema under the rules of ``convert``: null means absent, for unknown fields, too."""
    required = schema.get("required", [])
    properties = {name: field if name in required else _or_null(field) for name, field in schema["properties"].items()}
    others = {name: field for name, field in other_fields().items() if name not in properties}
    return {**schema, "properties": {**properties, **others}, "additionalProperties": {"type": "null"}}


def _or_null(field: Fields) -> Fields:
    null = {"type": "null"}
    if "anyOf" in field:
        return field if null in field["anyOf"] else {**field, "anyOf": [*field["anyOf"], null]}
    notes: Fields = {key: field[key] for key in ("description", "default") if key in field}
    return {"anyOf": [{key: field[key] for key in field if key not in notes}, null], **notes}


def _operation(operation: Operation) -> Fields:
    described: Fields = {"summary": operation.summary, "security": [{"key": []}, {"header": []}, {}]}
    described["parameters"] = _query_parameters(operation.query) if operation.query is not None else []
    if "{id}" in operation.path:
        described["parameters"] += [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        content = {"schema": _reference(operation.body), "example": EXAMPLE_BODIES[operation.body]}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    described["responses"] = {str(status): _failure(status, operation.error) for status in sorted(operation.statuses)}
    described["responses"]["200"] = {"description": "Success.", "content": _success(operation)}
    return described


def _query_parameters(query: type) -> list[Fields]:
    _, components = msgspec.json.schema_components([query])
    fields = components[query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]


def _success(operation: Operation) -> Fields:
    if operation.response is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    schema = _reference(operation.response)
    if operation.is_list:
        schema = {"type": "array", "items": schema}
    content: Fields = {"application/json": {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _failure(status: int, error: type) -> Fields:
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": _reference(error)}}}


def _reference(kind: type) -> Fields:
    return {"$ref": _REF.format(name=kind.__name__)}
