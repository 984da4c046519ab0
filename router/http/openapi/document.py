"""The OpenAPI document: every route with what it takes, what it answers, and every status it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.completions_api.body_parsing import other_fields
from router.completions_api.request_bodies import ChatBody, CompletionBody
from router.http.openapi import answers
from router.http.token_endpoints import DetokenizeBody, TokenizeBody
from router.responses_api.request import CHAT_ONLY, ItemsRequest

Fields = dict[str, Any]

# Each event of a stream, as OpenAPI tools take it apart. ``data`` is JSON, or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_REF = "#/components/schemas/{name}"
_STATUSES = {
    400: "The request cannot be served as it is; `param` names the field at fault.",
    401: "The request has no API key, or an unknown one.",
    404: "There is no such thing here; for requests that name a model: nobody serves it.",
    413: "The body exceeds the limit.",
    429: "The client has used up a limit of its own; `Retry-After` says when to come back.",
    500: "The router failed; its log says why.",
    502: "A node failed under the request.",
    503: "There is no room at present; `Retry-After` says when to come back.",
    504: "The request took longer than it may.",
}
_ANY = (401, 500)  # what every request may get
_BODY = (*_ANY, 400, 404, 413, 504)
_GENERATES = (*_BODY, 429, 502, 503)
_REFUSED = "Refused: responses are not stored"


class Operation(msgspec.Struct, frozen=True):
    """One method of one path. ``answer`` None: plain text."""

    method: str
    path: str
    summary: str
    answer: type | None
    statuses: Sequence[int] = _ANY
    takes: type | None = None
    streams: bool = False
    succeeds: bool = True


OPERATIONS = (
    Operation("post", "/v1/completions", "Complete a prompt", answers.Completion, _GENERATES, CompletionBody, True),
    Operation("post", "/v1/chat/completions", "Answer a chat", answers.ChatCompletion, _GENERATES, ChatBody, True),
    Operation("post", "/v1/responses", "Answer a list of items", answers.ItemsAnswer, _GENERATES, ItemsRequest, True),
    Operation("get", "/v1/responses/{id}", _REFUSED, None, (*_ANY, 404), succeeds=False),
    Operation("delete", "/v1/responses/{id}", _REFUSED, None, (*_ANY, 404), succeeds=False),
    Operation("post", "/v1/responses/{id}/cancel", _REFUSED, None, (*_ANY, 404), succeeds=False),
    Operation("get", "/v1/responses/{id}/input_items", _REFUSED, None, (*_ANY, 404), succeeds=False),
    Operation("get", "/v1/models", "The models that are served", answers.ModelList),
    Operation("get", "/v1/models/{id}", "One of them", answers.ModelCard, (*_ANY, 404)),
    Operation("post", "/tokenize", "Token ids of a text or chat", answers.TokenizeAnswer, (*_BODY, 503), TokenizeBody),
    Operation("post", "/detokenize", "The text of token ids", answers.DetokenizeAnswer, (*_BODY, 503), DetokenizeBody),
    Operation("get", "/health", "Whether requests can be served", answers.HealthAnswer, (*_ANY, 503)),
    Operation("get", "/version", "The version", answers.VersionAnswer),
    Operation("get", "/metrics", "Metrics, in Prometheus' format", None),
)


def openapi_document(version: str) -> bytes:
    """All of it, as JSON."""
    bodies = (CompletionBody, ChatBody, ItemsRequest, TokenizeBody, DetokenizeBody)
    shapes = [operation.answer for operation in OPERATIONS if operation.answer is not None]
    _, components = msgspec.json.schema_components([*bodies, answers.ErrorAnswer, *shapes], ref_template=_REF)
    taken = {kind: components.pop(kind.__name__) for kind in bodies}
    chat = taken[ChatBody]["properties"]
    items = taken[ItemsRequest]
    items["properties"] = {name: chat[name] for name in chat if name not in CHAT_ONLY} | items["properties"]
    paths: dict[str, Fields] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**components, **{kind.__name__: _body(schema) for kind, schema in taken.items()}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def _body(schema: Fields) -> Fields:
    """A request's schema with what ``convert`` makes of it: null is the same as absent, for names it knows or not."""
    required = schema.get("required", [])
    properties = {name: field if name in required else _or_null(field) for name, field in schema["properties"].items()}
    others = {name: field for name, field in other_fields().items() if name not in properties}
    return {**schema, "properties": {**properties, **others}, "additionalProperties": {"type": "null"}}


def _or_null(field: Fields) -> Fields:
    null = {"type": "null"}
    if "anyOf" in field:
        return field if null in field["anyOf"] else {**field, "anyOf": [*field["anyOf"], null]}
    default = {"default": field["default"]} if "default" in field else {}
    return {"anyOf": [{key: field[key] for key in field if key != "default"}, null], **default}


def _operation(operation: Operation) -> Fields:
    described: Fields = {"summary": operation.summary, "security": [{"key": []}, {}]}
    if "{id}" in operation.path:
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [name]
    if operation.takes is not None:
        schema = _reference(operation.takes)
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    described["responses"] = {str(status): _failure(status) for status in sorted(operation.statuses)}
    if operation.succeeds:
        described["responses"]["200"] = {"description": "It is done.", "content": _success(operation)}
    return described


def _success(operation: Operation) -> Fields:
    if operation.answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    content: Fields = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _failure(status: int) -> Fields:
    schema = _reference(answers.ErrorAnswer)
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}


def _reference(kind: type) -> Fields:
    return {"$ref": _REF.format(name=kind.__name__)}
