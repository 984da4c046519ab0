"""The OpenAPI document: each route with its request body, response object and statuses."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from router.completions_api.body_parsing import other_fields
from router.completions_api.request_bodies import ChatBody, CompletionBody
from router.completions_api.response_objects import ChatCompletion, Completion
from router.errors import ErrorResponse
from router.http.server_info import ServerInfo, ServerLoad, TokenizerInfo, TokenizerInfoQuery
from router.http.small_endpoints import (
    DetokenizeBody,
    DetokenizeResponse,
    HealthStatus,
    ModelCard,
    ModelList,
    TokenizeBody,
    TokenizeResponse,
    VersionInfo,
)
from router.http.stored_responses import ItemsQuery, RetrieveQuery
from router.messages_api.errors import MessagesErrorResponse
from router.messages_api.request import EXTENSIONS, CountTokensRequest, MessagesRequest
from router.messages_api.response_objects import Message, MessageTokensCount
from router.pooling.request_bodies import EmbeddingBody, RerankBody, ScoreBody
from router.pooling.response_objects import EmbeddingList, Ranking, ScoreList
from router.responses_api.output_objects import CompactedResponse, DeletedResponse, InputItemList, ResponseObject
from router.responses_api.request import CHAT_ONLY, CompactRequest, ResponsesRequest

Fields = dict[str, Any]

# One server-sent event; ``data`` is JSON or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_PARAMETER = re.compile(r"{[^}]*}")  # of a path
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
_ANY = (401, 500)  # every route
_BODY = (*_ANY, 400, 404, 413, 504)
_GENERATES = (*_BODY, 429, 502, 503)
_STORED = (*_ANY, 400, 404)


class Operation(msgspec.Struct, frozen=True):
    """One method of one path. ``response`` None: plain text."""

    method: str
    path: str
    summary: str
    response: type | None
    statuses: Sequence[int] = _ANY
    body: type | None = None
    streams: bool = False
    query: type | None = None
    error: type = ErrorResponse


OPERATIONS = (
    Operation("post", "/v1/completions", "Complete a prompt", Completion, _GENERATES, CompletionBody, True),
    Operation("post", "/v1/chat/completions", "Complete a chat", ChatCompletion, _GENERATES, ChatBody, True),
    Operation("post", "/v1/responses", "Create a response", ResponseObject, _GENERATES, ResponsesRequest, True),
    Operation(
        *("post", "/v1/responses/compact", "Replace a conversation by a summary", CompactedResponse, _GENERATES),
        body=CompactRequest,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Create a message (Anthropic's protocol)",
        Message,
        _GENERATES,
        MessagesRequest,
        streams=True,
        error=MessagesErrorResponse,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a message's prompt",
        MessageTokensCount,
        (*_BODY, 503),
        CountTokensRequest,
        error=MessagesErrorResponse,
    ),
    Operation("post", "/v1/embeddings", "Embed texts", EmbeddingList, _GENERATES, EmbeddingBody),
    *(
        Operation("post", path, "Score pairs of texts", ScoreList, _GENERATES, ScoreBody)
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation("post", path, "Rank documents by their relevance to a query", Ranking, _GENERATES, RerankBody)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Operation(
        "get", "/v1/responses/{id}", "Show a stored response", ResponseObject, _STORED, None, True, RetrieveQuery
    ),
    Operation("delete", "/v1/responses/{id}", "Delete a stored response", DeletedResponse, _STORED),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a background response", ResponseObject, _STORED),
    Operation(
        *("get", "/v1/responses/{id}/input_items", "List the input of a stored response", InputItemList, _STORED),
        query=ItemsQuery,
    ),
    Operation("get", "/v1/models", "List models", ModelList),
    Operation("get", "/v1/models/{id}", "Show a model", ModelCard, (*_ANY, 404)),
    Operation("post", "/tokenize", "Tokenize a text or chat", TokenizeResponse, (*_BODY, 503), TokenizeBody),
    Operation("post", "/detokenize", "Detokenize token ids", DetokenizeResponse, (*_BODY, 503), DetokenizeBody),
    Operation("get", "/health", "Check readiness", HealthStatus, (*_ANY, 503)),
    Operation("get", "/ping", "Check readiness", HealthStatus, (*_ANY, 503)),
    Operation("get", "/health/live", "Check that the router responds, with or without nodes", HealthStatus),
    Operation("get", "/version", "Show the version", VersionInfo),
    Operation("get", "/metrics", "Prometheus metrics", None),
    Operation("get", "/load", "Count the requests in progress", ServerLoad),
    Operation("get", "/server_info", "Show options, models and nodes", ServerInfo),
    Operation(
        *("get", "/tokenizer_info", "Show the tokenizer's configuration", TokenizerInfo, (*_ANY, 400, 404)),
        query=TokenizerInfoQuery,
    ),
)


def check_documented(routes: Sequence[BaseRoute], others: Collection[str]) -> None:
    """Assert that the document has all routes but ``others``, and no more."""
    served = {
        (_PARAMETER.sub("{id}", route.path), method.lower())
        for route in routes
        if isinstance(route, Route) and route.path not in others
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {(operation.path, operation.method) for operation in OPERATIONS}
    assert served == documented, f"the OpenAPI document differs from the routes in {served ^ documented}"


def openapi_document(version: str) -> bytes:
    bodies = tuple(dict.fromkeys(operation.body for operation in OPERATIONS if operation.body is not None))
    responses = [operation.response for operation in OPERATIONS if operation.response is not None]
    errors = {operation.error for operation in OPERATIONS}
    _, components = msgspec.json.schema_components([*bodies, *errors, *responses], ref_template=_REF)
    schemas = {kind: components.pop(kind.__name__) for kind in bodies}
    chat = schemas[ChatBody]["properties"]
    of_chats = {ResponsesRequest: chat.keys() - CHAT_ONLY, MessagesRequest: EXTENSIONS, CountTokensRequest: EXTENSIONS}
    for kind, names in of_chats.items():
        schemas[kind]["properties"] = {name: chat[name] for name in chat if name in names} | schemas[kind]["properties"]
    paths: dict[str, Fields] = {}
    for operation in OPERATIONS:
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
        schema = _reference(operation.body)
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
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
    content: Fields = {"application/json": {"schema": _reference(operation.response)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _failure(status: int, error: type) -> Fields:
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": _reference(error)}}}


def _reference(kind: type) -> Fields:
    return {"$ref": _REF.format(name=kind.__name__)}
